"""What goes out when a file was opened for writing and its content stayed what it was."""

from __future__ import annotations

import os

from cachefs.vfs.attributes import ROOT
from tests.daemon.lab import Lab, in_lab

TRIES = 20
"""Each falls somewhere in a tick of the clock that files are stamped by."""


@in_lab()
async def test_times_that_moved_without_the_content_are_shown(lab: Lab) -> None:
    """A file is truncated to the size that it had, at once after it was opened for that."""
    await lab.write("f", b"content")
    await lab.wait("f")
    row = lab.services.meta.inodes.lookup(ROOT, b"f")
    assert row is not None
    for _ in range(TRIES):
        await lab.services.files.truncate(row.ino, len(b"content"), None)
        await lab.wait("f")
        now = lab.services.meta.inodes.get(row.ino)
        assert now is not None
        assert lab.bucket.mtime_ns("f") == now.mtime_ns


@in_lab()
async def test_nothing_goes_out_when_nothing_changed(lab: Lab) -> None:
    await lab.write("f", b"content")
    await lab.wait("f")
    for _ in range(TRIES):
        lab.close(await lab.open("f", os.O_WRONLY))
        assert not lab.services.queue.effects
