"""The two ways to write a rank's shards. Every call that reaches the filesystem is timed."""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import aiofiles

from cachefs.bench.content import Content, read_blocks
from cachefs.bench.workload import Style, Task, Timings

_MODE = 0o644
Report = Callable[[int], None]
"""Told the number of bytes after each write."""

_clock = time.perf_counter


def write_all(task: Task, contents: list[Content], timings: Timings, report: Report) -> None:
    """Write the task's shards; raises OSError as the filesystem does."""
    if task.style is Style.ASYNC:
        asyncio.run(_write_together(task, contents, timings, report))
        return
    for path, content in zip(paths(task), contents, strict=True):
        _write_one(path, task, content, timings, report)


def paths(task: Task) -> list[str]:
    """Where the task's shards are."""
    work = task.workload
    names = (work.shard(task.rank, number) for number in range(work.files))
    return [os.path.join(task.directory, name) for name in names]


def _flags(task: Task) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return flags | os.O_DIRECT if task.workload.direct else flags


def _write_one(path: str, task: Task, content: Content, timings: Timings, report: Report) -> None:
    begun = _clock()
    fd = os.open(path, _flags(task), _MODE)
    timings.open.append(_clock() - begun)
    try:
        for block in content.blocks():
            begun = _clock()
            written = os.write(fd, block)
            timings.write.append(_clock() - begun)
            if written != len(block):
                raise OSError(f"{path}: wrote {written} of {len(block)} bytes")
            report(written)
        if task.workload.fsync:
            begun = _clock()
            os.fsync(fd)
            timings.fsync.append(_clock() - begun)
    finally:
        begun = _clock()
        os.close(fd)
        timings.close.append(_clock() - begun)


async def _write_together(
    task: Task, contents: list[Content], timings: Timings, report: Report
) -> None:
    async with asyncio.TaskGroup() as group:
        for path, content in zip(paths(task), contents, strict=True):
            group.create_task(_write_async(path, task, content, timings, report))


async def _write_async(
    path: str, task: Task, content: Content, timings: Timings, report: Report
) -> None:
    def opener(name: str, _: int) -> int:
        return os.open(name, _flags(task), _MODE)

    begun = _clock()
    # Unbuffered, so that every write here is one write of the filesystem.
    file = await aiofiles.open(path, "wb", buffering=0, opener=opener)
    timings.open.append(_clock() - begun)
    try:
        for block in content.blocks():
            begun = _clock()
            written = await file.write(block)
            timings.write.append(_clock() - begun)
            if written != len(block):
                raise OSError(f"{path}: wrote {written} of {len(block)} bytes")
            report(written)
        if task.workload.fsync:
            begun = _clock()
            await asyncio.to_thread(os.fsync, file.fileno())
            timings.fsync.append(_clock() - begun)
    finally:
        begun = _clock()
        await file.close()
        timings.close.append(_clock() - begun)


def read_all(task: Task, timings: Timings) -> float:
    """Read the shards back, one after the other; seconds it took."""
    start = begun = _clock()
    for path in paths(task):
        for _ in read_blocks(path, task.workload.block, direct=task.workload.direct):
            now = _clock()
            timings.read.append(now - begun)
            begun = now
    return _clock() - start


def differing(task: Task, contents: list[Content]) -> list[str]:
    """Names of the shards whose checksum is not that of what was written."""
    bad = []
    for path, content in zip(paths(task), contents, strict=True):
        crc = 0
        for block in read_blocks(path, task.workload.block, direct=task.workload.direct):
            crc = zlib.crc32(block, crc)
        if crc != content.checksum():
            bad.append(Path(path).name)
    return bad
