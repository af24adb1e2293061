"""What Linux knows about a filesystem and Python's `os` does not offer.

Its type, and punching holes; reading without waiting, writing without stopping short.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from cachefs.failpoints import Point, reach

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)

RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
"""Flag of preadv(2) for what the page cache holds; 0 where there is none."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# XFS_IOC_FREE_EOFBLOCKS with struct xfs_fs_eofblocks: version 1, XFS_EOF_FLAGS_SYNC.
_XFS_FREE_EOFBLOCKS = 0x8080583A
_XFS_ALL_FILES = struct.pack("=II120x", 1, 1)

_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02
_SYNC_FILE_RANGE_WAIT_BEFORE = 1

# struct statfs begins with f_type, a C long on every 64-bit Linux; the rest (120 bytes) is not
# read.
_STATFS_BYTES = 256
_PRIVATE = 0o700


CLOCK_REALTIME_COARSE = 5
"""The clock that files' times are taken from where they are no finer than its ticks."""
_FINE_TRIES = 20


class DeviceKind(StrEnum):
    """What a cache device is made of, which decides what its bytes survive and how fast it is."""

    RAM = "ram"
    DISK = "disk"
    NETWORK = "network"


# Magic numbers from linux/magic.h and the filesystems' own sources.
_RAM = {
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x958458F6: "hugetlbfs",
}
_NETWORK = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFE534D42: "smb2",
    0xFF534D42: "cifs",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x65735546: "fuse",  # virtiofs too
    0x01021997: "9p",
    0x5346414F: "afs",
    0x6B414653: "kafs",
    0x73757245: "coda",
    0x01161970: "gfs2",
    0x7461636F: "ocfs2",
    0x19830326: "beegfs",
    0xAAD7AAEA: "panfs",
    0x20030528: "orangefs",
}
_DISK = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
}
_STACKED = {
    0x794C7630: "overlayfs",
    0xF15F: "ecryptfs",
}


def filesystem_type(path: str | Path) -> int:
    """`f_type` of the filesystem that holds `path`, as an unsigned 32-bit number."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


def device_kind(fs_type: int) -> DeviceKind:
    """Class of a filesystem by its magic number.

    What is not known to be RAM or network is a disk.
    """
    if fs_type in _RAM:
        return DeviceKind.RAM
    if fs_type in _NETWORK:
        return DeviceKind.NETWORK
    return DeviceKind.DISK


def filesystem_name(fs_type: int) -> str:
    """Name of a filesystem for messages, `0x...` when it is none of those told apart here."""
    for table in (_RAM, _NETWORK, _DISK, _STACKED):
        if fs_type in table:
            return table[fs_type]
    return f"{fs_type:#x}"


def stack_depth(fs_type: int) -> int:
    """`max_stack_depth` that FUSE passthrough needs for backing files on this filesystem.

    1 for a plain one. A filesystem that is itself stacked on another (overlayfs, as in a
    container's root) counts as one level more.
    """
    return 2 if fs_type in _STACKED else 1


def is_spinning(path: str | Path) -> bool:
    """Whether the disk that holds `path` is said to spin. What nobody can tell does not: a
    filesystem over several disks, one in memory, one that is elsewhere."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    for place in (device, device.parent):  # Of a partition, the disk's directory is above it.
        try:
            return (place / "queue/rotational").read_text().strip() == "1"
        except OSError:
            continue
    return False


def boot_id() -> str:
    """Names this run of the machine; another one after it went down. See random(4)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def sync_filesystem(path: Path) -> None:
    """Bring all that was written to the filesystem of `path` to its disk. Blocks. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
    reach(Point.SYNC_ALL_AFTER_SYNC)


def wait_for_writes(fd: int) -> None:
    """Wait for writes of an open file that are under way; OSError if any has failed that nobody was
    told of through this file. Begins none, and asks the disk for nothing. See
    sync_file_range(2)."""
    if _libc.sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WAIT_BEFORE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def punch_hole(fd: int, start: int, end: int) -> None:
    """Give back the blocks of bytes [start, end); the size stays, the range reads as zeros."""
    if end <= start:
        return
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if _libc.fallocate(fd, mode, start, end - start) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def free_preallocation(fd: int) -> None:
    """Give back what XFS has set aside behind the ends of files that grow: as much again as they
    have, as a rule. Nothing on other filesystems, or for whom it is not allowed to.

    Source: fs/xfs/libxfs/xfs_fs.h, fs/xfs/xfs_icache.c. Safe beside writers of the files.
    """
    with suppress(OSError):
        fcntl.ioctl(fd, _XFS_FREE_EOFBLOCKS, _XFS_ALL_FILES)


def read_cached(fd: int, offset: int, size: int) -> memoryview | None:
    """What the page cache holds from `offset` on; None when that cannot be had without waiting."""
    buffer = bytearray(size)
    try:
        count = os.preadv(fd, [buffer], offset, RWF_NOWAIT)
    except BlockingIOError:
        return None
    except OSError as err:
        if err.errno in _UNSUPPORTED:
            return None
        raise
    return memoryview(buffer)[:count]


def write_all(fd: int, data: bytes, offset: int) -> None:
    """pwrite until everything is written: a short write is followed by its error."""
    written = os.pwrite(fd, data, offset)
    while written < len(data):
        written += os.pwrite(fd, memoryview(data)[written:], offset + written)


def has_fine_times(directory: str) -> bool:
    """Whether a file that was looked at since its last change gets a time of its own at the next
    one (Linux 6.13 and later, most filesystems), not just that of the last tick of the clock."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:
        return False
    try:
        return any(_tells_changes_apart(fd) for _ in range(_FINE_TRIES))
    except OSError:
        return False  # A full disk must not keep anybody from mounting.
    finally:
        os.close(fd)


def _tells_changes_apart(fd: int) -> bool:
    """False as well if the clock ticked meanwhile."""
    tick = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    times = []
    for _ in range(2):
        os.pwrite(fd, b"x", 0)
        times.append(os.fstat(fd).st_mtime_ns)
    return times[0] != times[1] and tick == time.clock_gettime_ns(CLOCK_REALTIME_COARSE)


def memory_places(directories: Collection[Path]) -> Iterator[Path]:
    """Those that are in memory and this user's; made if they are not there."""
    for directory in directories:
        with suppress(OSError):
            directory.mkdir(_PRIVATE, parents=True, exist_ok=True)
            found = directory.lstat()
            is_own = found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)
            if is_own and device_kind(filesystem_type(directory)) is DeviceKind.RAM:
                yield directory
