"""Handles across daemons: the kernel goes on with those that a dead daemon gave out.

The tap's shared memory says which are open. Each comes back with its number, its inode and its
lane; what the dead daemon knew in memory is gone, so a tracked generation that was being written
counts as dirty in whole.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator

import structlog

from cachefs.cache.fresh import write_time
from cachefs.daemon.services import Services
from cachefs.fuse.lanes import tell_of_writer
from cachefs.fuse.tap import Opcode, OpenHandle, Poisoned, Tap
from cachefs.meta.rows import GenerationRow, InodeRow
from cachefs.model.states import GenState
from cachefs.vfs.attributes import has_privileges
from cachefs.vfs.opened import Lane, OpenInode, open_cache_file

log = structlog.get_logger("cachefs.takeover")


def restore_handles(services: Services, tap: Tap | None) -> Collection[int]:
    """Rebuild the handle table after a takeover; returns the inodes that are open."""
    if tap is None or not tap.is_takeover:
        return ()
    for handle in tap.open_handles():
        if handle.is_dir:
            services.table.directories[handle.fh] = handle.nodeid
        else:
            _restore(services, handle, tap)
    for request in tap.poisoned():
        _roll_back(services, request)
    coming = _about_to_open(services, tap)
    _find_mapped(services, coming)
    opened = set(services.table.inodes)
    tap.reconcile(ino for ino, each in services.table.inodes.items() if _is_passthrough(each))
    log.info(
        "took over",
        files=len(services.table.handles),
        inodes=len(opened),
        inflight=_in_flight(tap),
    )
    return opened | coming | set(services.table.directories.values())


def _find_mapped(services: Services, coming: set[int]) -> None:
    """Files that are closed but written through a mapping, which no handle shows."""
    for gen in services.meta.generations.in_states(GenState.OPEN):
        inode = services.meta.inodes.get(gen.ino)
        if gen.lane != Lane.PASSTHROUGH or inode is None or not inode.nlink:
            continue
        if gen.ino in services.table.inodes or gen.ino in coming or not _is_written(services, gen):
            continue
        opened = _open_inode(services, inode, gen, passthrough=True)
        if opened is not None:
            services.files.resume(opened)
            services.table.linger(opened)


def _is_written(services: Services, gen: GenerationRow) -> bool:
    try:
        return services.contents.device(gen).writer_open(gen.file)
    except OSError:
        return False


def _about_to_open(services: Services, tap: Tap) -> set[int]:
    """Inodes that requests sent again will open: what the dead daemon did for them stays."""
    coming: set[int] = set()
    for request in tap.inflight():
        if request.opcode is Opcode.OPEN:
            coming.add(request.nodeid)
        elif request.opcode is Opcode.CREATE:
            coming.update(_just_made(services, request.nodeid))
    return coming


def _just_made(services: Services, directory: int) -> Iterator[int]:
    """Empty open files of a directory: one of them may be what an unanswered request made."""
    for gen in services.meta.generations.in_states(GenState.OPEN):
        names = services.meta.dentries.of_inode(gen.ino)
        if gen.size == 0 and any(name.parent == directory for name in names):
            yield gen.ino


def _in_flight(tap: Tap) -> str:
    """What the dead daemon left unanswered: `CREATE:2 WRITE:1`."""
    names = Counter(request.opcode.name for request in tap.inflight())
    return " ".join(f"{name}:{count}" for name, count in sorted(names.items()))


def _roll_back(services: Services, request: Poisoned) -> None:
    """A request that brought two daemons down was answered EIO; a file it made is not wanted."""
    log.error("a request was given up on", op=request.opcode.name, inode=request.nodeid)
    if request.opcode is not Opcode.CREATE or not request.names:
        return
    row = services.meta.inodes.lookup(request.nodeid, request.names[0])
    gen = services.meta.generations.get(row.gen) if row and row.gen is not None else None
    if row is None or gen is None or gen.state != GenState.OPEN:
        return
    if row.ino not in services.table.inodes and gen.size == 0:
        services.namespace.unlink(request.nodeid, request.names[0])


def _is_passthrough(opened: OpenInode) -> bool:
    return opened.lane is Lane.PASSTHROUGH


def _restore(services: Services, handle: OpenHandle, tap: Tap) -> None:
    opened = services.table.inodes.get(handle.nodeid)
    if opened is None:
        opened = _reopen(services, handle)
        if opened is None:
            return
        services.files.resume(opened)
    restored = services.table.add(opened, handle.flags, handle.fh)
    if restored.writable and opened.writing:
        tell_of_writer(tap, restored)


def _reopen(services: Services, handle: OpenHandle) -> OpenInode | None:
    inode = services.meta.inodes.get(handle.nodeid)
    gen = services.meta.generations.current(handle.nodeid)
    if inode is None or gen is None:
        # As it should be when its last handle's release was applied but not answered.
        log.info("an open file is unknown to the database", inode=handle.nodeid)
        return None
    return _open_inode(services, inode, gen, passthrough=handle.passthrough)


def _open_inode(
    services: Services, inode: InodeRow, gen: GenerationRow, *, passthrough: bool
) -> OpenInode | None:
    device = services.contents.device(gen)
    try:
        fd = device.open(gen.file) if passthrough else open_cache_file(device, gen.file)
    except OSError as error:
        log.error("the cache file of an open file is gone", inode=inode.ino, reason=str(error))
        return None
    status = os.fstat(fd)
    lane = Lane.PASSTHROUGH if passthrough else Lane.TRACKED
    written_ns = write_time(status, inode.mtime_ns)
    opened = OpenInode(
        inode.ino,
        gen,
        device,
        fd,
        lane,
        status.st_size,
        written_ns,
        untouched_ns=status.st_mtime_ns,
    )
    opened.writing = gen.state == GenState.OPEN
    opened.orphaned = inode.nlink == 0
    opened.privileged = has_privileges(inode.mode)
    opened.accounted = status.st_blocks * 512
    opened.stream = services.contents.stream_of(gen)
    if gen.present is not None:
        opened.fill = services.contents.fill_still_open(inode, gen)
        opened.size, opened.mtime_ns = inode.size, inode.mtime_ns
    elif not opened.writing:
        opened.mtime_ns = inode.mtime_ns
    return opened
