"""Files that are larger than the cache are opened for writing: what happens meanwhile."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from typing import Any

import pytest
import trio

from cachefs.vfs.borrowing import Borrower
from tests.daemon.lab import Lab, in_lab, until

MIB = 1 << 20
BODY = b"".join(bytes([n + 1]) * MIB for n in range(20))


async def huge(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> int:
    """A file that the store alone has, and for which there would be no room; open."""
    await lab.store_only("f.bin", BODY)
    lab.parts.offloader.can_copy = lambda: True
    monkeypatch.setattr(Borrower, "_is_too_large", lambda self, opened: opened.fill is not None)
    return await lab.open("f.bin", os.O_RDWR)


@in_lab("flush.settle=0s")
async def test_renamed_before_it_is_copied(lab: Lab) -> None:
    """By us: it is the same object still, and can be written to."""
    with pytest.MonkeyPatch.context() as patch:
        fh = await huge(lab, patch)
        borrow, begun, may_go = lab.parts.hidden.borrow, trio.Event(), trio.Event()

        async def late(*words: Any) -> Sequence[Any]:
            begun.set()
            await may_go.wait()
            return await borrow(*words)

        patch.setattr(lab.parts.hidden, "borrow", late)
        writing = lab.asking(lambda: lab.put(fh, b"new", 3 * MIB))
        await begun.wait()
        await lab.rename("f.bin", "g.bin")
        await until(lambda: lab.bucket.keys() == ["g.bin"])
        may_go.set()
        await writing
        lab.close(fh)
        await lab.wait()
        await lab.parts.hidden.sweep()
        assert lab.bucket.keys() == ["g.bin"]
        assert lab.bucket.get("g.bin") == BODY[: 3 * MIB] + b"new" + BODY[3 * MIB + 3 :]


@in_lab("flush.settle=0s")
async def test_removed_while_it_is_copied(lab: Lab) -> None:
    """Who has it open goes on, and nothing is left in the end."""
    with pytest.MonkeyPatch.context() as patch:
        fh = await huge(lab, patch)
        borrow, begun, may_go = lab.parts.hidden.borrow, trio.Event(), trio.Event()

        async def slow(*words: Any) -> Sequence[Any]:
            spans = await borrow(*words)
            begun.set()
            await may_go.wait()
            return spans

        patch.setattr(lab.parts.hidden, "borrow", slow)
        writing = lab.asking(lambda: lab.put(fh, b"new", 3 * MIB))
        await begun.wait()
        await lab.remove("f.bin")
        may_go.set()
        await writing
        assert bytes(await lab.services.files.read(fh, 3 * MIB, 4)) == b"new\4"
        lab.close(fh)
        await lab.wait()
        await lab.parts.leaving.sweep(lab.services.devices[0])
        await lab.parts.hidden.sweep()
        assert lab.bucket.keys() == []
        assert lab.services.ledgers[0].used == 0 == lab.services.devices[0].allocated_total()


@in_lab("flush.settle=0s")
async def test_not_recorded(lab: Lab) -> None:
    """The database refuses it: nothing is left of the attempt, and the next one succeeds."""
    with pytest.MonkeyPatch.context() as patch:
        fh = await huge(lab, patch)

        def refuse(*words: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.MonkeyPatch.context() as failing:
            failing.setattr(lab.services.meta.spans, "adopt", refuse)
            with pytest.raises(sqlite3.OperationalError):
                await lab.put(fh, b"new", 3 * MIB)
        await until(lambda: sorted(os.listdir("/proc/self/fd")) == before)
        await until(lambda: len(list(lab.services.devices[0].list_generations())) == 1)
        await lab.put(fh, b"new", 3 * MIB)
        lab.close(fh)
        await lab.wait()
        await lab.parts.hidden.sweep()
        assert lab.bucket.keys() == ["f.bin"]
        assert lab.bucket.get("f.bin") == BODY[: 3 * MIB] + b"new" + BODY[3 * MIB + 3 :]
