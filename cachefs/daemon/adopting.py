"""A file that lies outside becomes a file of the mount, if possible without a copy of its bytes.

For what was written to the cache's own filesystem without this one in between: a snapshot in RAM,
or a file that was written to the device directly (GPUDirect Storage). On the filesystem of a cache
device the file itself becomes the cache file; elsewhere its blocks are shared where the filesystems
can do that, or it is copied. It appears under its new name with all its bytes at one instant, as if
it had been renamed there, and only then, when everything is on the disk, its old name goes.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Any

import trio

from cachefs.cache import doubt
from cachefs.cache.device import BLOCK_UNIT, CacheDevice
from cachefs.daemon.paths import Spot, inside, locate
from cachefs.daemon.services import Services
from cachefs.errors import CachefsError, UsageError
from cachefs.failpoints import Change
from cachefs.meta.rows import InodeRow
from cachefs.model.objectmeta import XATTR_LIMIT, encode_xattrs
from cachefs.model.states import GenState
from cachefs.model.survival import Level
from cachefs.observe.control import Progress
from cachefs.observe.protocol import ControlError
from cachefs.vfs.clock import now_ns
from cachefs.vfs.opened import Lane
from cachefs.vfs.virtual import PREFIX

_Xattrs = tuple[tuple[bytes, bytes], ...]
_INTERIM = b".adopted-"
"""Name for the length of one transaction: nobody ever sees it."""


class Adoption:
    """The handler of `adopt`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._meta = services.meta

    async def adopt(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Move the file `src` (any absolute path) to `dst` in the mount.

        Result: `method` (link, reflink, copy) and `bytes`. Exit code 1 for what rename(2) would
        refuse, and while somebody still writes to the file.
        """
        source, target = args.get("src"), args.get("dst")
        if not isinstance(source, str) or not os.path.isabs(source):
            raise UsageError("malformed request: `src` must be an absolute path")
        top = self._services.mountpoint.rstrip("/")
        if os.path.normpath(source).startswith(f"{top}/"):
            raise UsageError(f"{source} is in the mount already: rename it")
        folder, name = await self._target(target)
        if await trio.to_thread.run_sync(self._is_of_cache, source):
            raise UsageError(f"{source} is a file of the cache itself")
        try:
            return await self._adopt(source, folder, name)
        except OSError as error:
            raise ControlError(f"{error.filename or source}: {_reason(error)}") from None

    def _is_of_cache(self, source: str) -> bool:
        """In a thread. What is in there is some file's already, or the database."""
        real = os.path.realpath(source)
        places = [each.directory for each in self._services.devices]
        kept = [os.path.realpath(place / part) for place in places for part in ("files", "meta")]
        return any(real.startswith(f"{each}/") for each in kept)

    async def _target(self, path: object) -> tuple[Spot, bytes]:
        name = os.path.basename(inside(self._services, path))
        folder = await locate(self._services, os.path.dirname(str(path).rstrip("/")))
        if not name or not folder.is_dir:
            raise UsageError(f"{path}: not a name in a directory of the mount")
        return folder, os.fsencode(name)

    async def _adopt(self, source: str, folder: Spot, name: bytes) -> dict[str, Any]:
        # In a thread, like all that follows the path: it may lead into this very mount.
        status = await trio.to_thread.run_sync(os.lstat, source)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "only regular files can be adopted", source)
        xattrs = await trio.to_thread.run_sync(_xattrs, source)
        await self._check(folder, name)
        device = self._device(status)
        file = self._services.contents.new_file_number()
        method = await self._bring(device, source, file, status)
        try:
            await self._check_unchanged(source, status, xattrs)
            await self._secure(device, file)
            with self._services.hold(folder.row.ino):
                await self._check(folder, name)
                self._publish(device, file, status, xattrs, folder, name)
        except BaseException:
            device.remove(file)
            raise
        self._services.contents.on_account(device, device.allocated(file))
        await self._services.on_names(folder.row.ino, [name])
        if device.survives > Level.PROCESS:
            await self._services.sync_meta()
        with suppress(FileNotFoundError):
            await trio.to_thread.run_sync(os.unlink, source)
        return {"method": method, "bytes": status.st_size}

    async def _check(self, folder: Spot, name: bytes) -> None:
        """What rename(2) would refuse."""
        await self._services.namespace.prepare_create(folder.row.ino, name)
        present = self._meta.inodes.lookup(folder.row.ino, name)
        if present is not None and stat.S_ISDIR(present.mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(name))

    def _device(self, status: os.stat_result) -> CacheDevice:
        """The one on the file's own filesystem, or the one for a new file of its size."""
        for device in self._services.devices:
            if device.healthy and os.stat(device.directory).st_dev == status.st_dev:
                return device
        return self._services.contents.place(status.st_size)

    async def _bring(
        self, device: CacheDevice, source: str, file: int, status: os.stat_result
    ) -> str:
        ledger, needed = self._services.ledgers[device.index], status.st_blocks * BLOCK_UNIT
        if not ledger.try_admit(needed) and not await ledger.admit_after_eviction(needed):
            raise OSError(errno.ENOSPC, "no room in the cache", source)
        try:
            return await trio.to_thread.run_sync(device.adopt, source, file)
        finally:
            ledger.settle(needed, 0)

    async def _check_unchanged(self, source: str, status: os.stat_result, xattrs: _Xattrs) -> None:
        now = await trio.to_thread.run_sync(os.lstat, source)
        same = await trio.to_thread.run_sync(_xattrs, source) == xattrs
        if not same or (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            raise OSError(errno.ETXTBSY, "the file is being written", source)

    async def _secure(self, device: CacheDevice, file: int) -> None:
        """Its bytes outlive what the device does, before its old name goes."""
        if device.forgets:
            return
        fd = device.open(file, os.O_RDONLY)
        try:
            await trio.to_thread.run_sync(doubt.sync, fd)
        finally:
            os.close(fd)
        await trio.to_thread.run_sync(device.sync_dir, file)

    def _publish(
        self,
        device: CacheDevice,
        file: int,
        status: os.stat_result,
        xattrs: _Xattrs,
        folder: Spot,
        name: bytes,
    ) -> None:
        namespace, parent = self._services.namespace, folder.row.ino
        replaces = self._meta.dentries.get(parent, name) is not None
        first = _INTERIM + str(file).encode() if replaces else name
        row = InodeRow(
            0, status.st_mode, status.st_uid, status.st_gid, 1, status.st_size,
            status.st_atime_ns, status.st_mtime_ns, now_ns(), blocks=status.st_blocks,
        )  # fmt: skip
        lasting = device.survives > Level.PROCESS
        with self._meta.transaction(Change.ADOPT):
            row.ino = self._meta.inodes.new_number()
            gen = self._services.contents.add_generation(
                row.ino, device, file, Lane.TRACKED, state=GenState.SEALED, size=row.size,
                anchored=lasting,
            )  # fmt: skip
            gen.sealed_ns, gen.synced = gen.created_ns, int(lasting)
            self._meta.generations.save(gen)
            row.gen = gen.gen
            for each, value in xattrs:
                self._meta.inodes.set_xattr(row.ino, each, value)
            namespace.link_new(parent, first, row)
            self._services.contents.publish(row.ino, gen)
            if replaces:
                namespace.rename(parent, first, parent, name, 0)


def _xattrs(source: str) -> _Xattrs:
    """In a thread: those of users. E2BIG for more than an object can carry."""
    try:
        names = os.listxattr(source, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            return ()
        raise
    chosen = [n for n in names if n.startswith("user.") and not n.startswith(PREFIX.decode())]
    found = tuple(
        (os.fsencode(each), os.getxattr(source, each, follow_symlinks=False))
        for each in sorted(chosen)
    )
    if len(encode_xattrs(found)) > XATTR_LIMIT:
        what = f"its extended attributes exceed the {XATTR_LIMIT} bytes that an object can carry"
        raise OSError(errno.E2BIG, f"{what}: remove some", source)
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, CachefsError):
        return str(error)
    return getattr(error, "strerror", None) or str(error)
