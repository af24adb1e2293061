"""A directory is read as its listing comes in."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from cachefs.vfs.attributes import ROOT
from tests.daemon.lab import Lab, in_lab

COUNT = 2500
NAMES = [f"f{number:04d}" for number in range(COUNT)]
BODY = bytes(5000)
"""Too long for a symlink: nothing else is asked about them."""


async def filled(lab: Lab) -> int:
    """The inode of a directory of which only the bucket knows what is in it."""
    folder = Path(lab.services.settings.store.url.removeprefix("file://"), "d")
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(BODY)
    lab.services.meta.db.execute("UPDATE inode SET listed_ns=NULL WHERE ino=?", (ROOT,))
    await lab.services.namespace.list_directory(ROOT)
    known = lab.services.meta.inodes.lookup(ROOT, b"d")
    assert known is not None
    return known.ino


async def read(lab: Lab, ino: int, after: int = 0, count: int = 100) -> tuple[list[str], int]:
    """(names, cookie of the last one)."""
    rows = await lab.services.namespace.entries(ino, after, count)
    return [name.decode() for _, name, _ in rows], rows[-1][0] if rows else after


@in_lab()
async def test_the_first_entries_do_not_wait_for_the_last(lab: Lab) -> None:
    ino = await filled(lab)
    lab.bucket.hold("list", after=1)
    await lab.services.namespace.begin_listing(ino)
    names: list[str] = []
    last = 0
    while len(names) < 1000:
        more, last = await read(lab, ino, last)
        names += more
    waiting = lab.asking(lambda: read(lab, ino, last))
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert not waiting.done
    lab.bucket.let_go()
    more, last = await waiting
    while more:
        names += more
        more, last = await read(lab, ino, last)
    assert sorted(names) == NAMES
    assert len(names) == COUNT, "none twice"
    row = lab.services.meta.inodes.get(ino)
    assert row is not None
    assert row.listed_ns is not None


@in_lab()
async def test_what_is_made_or_asked_for_meanwhile(lab: Lab) -> None:
    """A name that is looked up is found wherever it stands, and readers see what is new."""
    ino = await filled(lab)
    names, last = await read(lab, ino)
    await lab.write("d/new")
    found = await lab.services.namespace.lookup(ino, NAMES[-1].encode())
    assert found.size == len(BODY)
    while True:
        more, last = await read(lab, ino, last)
        names += more
        if not more:
            break
    assert sorted(names) == sorted([*NAMES, "new"])


@in_lab()
async def test_two_readers_share_a_listing(lab: Lab) -> None:
    ino = await filled(lab)
    found: list[list[str]] = []

    async def one() -> None:
        names: list[str] = []
        last = 0
        while True:
            more, last = await read(lab, ino, last)
            names += more
            if not more:
                found.append(names)
                return

    asked = 0
    call = lab.bucket.call

    async def counted(method: str, /, **arguments: object) -> object:
        nonlocal asked
        asked += method == "list"
        return await call(method, **arguments)

    lab.bucket.call = counted  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(one)
    assert [sorted(names) for names in found] == [NAMES] * 3
    assert asked == 3
