"""A client process: carries out single filesystem operations that it is told over a pipe.

Run as a program (standard library only, no import of the product or of the tests). It reads one
JSON list `[operation, argument...]` a line and answers `{"ok": value}`, `{"errno": NAME}` or, for a
mistake of the harness itself, `{"bug": text}`. Open files live in numbered slots, as a program's
descriptors would. Paths are relative to the directory given by the last `reset`.

Results are normalised so that a mount and a local directory can be compared: bytes become a
length, a short digest and (when short) the bytes themselves.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import operator
import os
import random
import stat
import sys
from ctypes import c_char_p, c_int, c_long, c_size_t, c_uint, c_void_p

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
_libc.munmap.argtypes = [c_void_p, c_size_t]
_libc.msync.argtypes = [c_void_p, c_size_t, c_int]
_libc.renameat2.argtypes = [c_int, c_char_p, c_int, c_char_p, c_uint]
_libc.fallocate.argtypes = [c_int, c_int, c_long, c_long]
_libc.syscall.restype = c_long
_PROT = {"r": 1, "rw": 3}
_MAP = {"shared": 1, "private": 2}
_PAGE, _AT_FDCWD = os.sysconf("SC_PAGE_SIZE"), -100

root = "."
slots: dict[int, int] = {}
maps: dict[int, tuple[int, int]] = {}


@functools.lru_cache(maxsize=256)
def pattern(seed: int, size: int) -> bytes:
    """Bytes made from a seed; no two seeds share a block."""
    return random.Random(seed).randbytes(size)


def digest(data: bytes) -> dict[str, object]:
    """What is compared of some bytes."""
    seen: dict[str, object] = {"len": len(data), "sha": hashlib.sha1(data).hexdigest()[:16]}
    if len(data) <= 64:
        seen["hex"] = data.hex()
    return seen


def at(path: str) -> str:
    """The absolute path of a path below the current root ("" is the root itself)."""
    return os.path.join(root, path) if path else root


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def flags_of(text: str) -> int:
    """`"RDWR|CREAT"` -> the open(2) flags."""
    names: list[int] = [getattr(os, "O_" + name) for name in text.split("|")]
    return functools.reduce(operator.or_, names)


def attributes(entry: os.stat_result) -> dict[str, object]:
    """The attributes of an inode that tests compare, times and numbers in nanoseconds and bytes."""
    return {
        "type": stat.S_IFMT(entry.st_mode),
        "mode": stat.S_IMODE(entry.st_mode),
        "nlink": entry.st_nlink,
        "size": entry.st_size,
        "uid": entry.st_uid,
        "gid": entry.st_gid,
        "ino": entry.st_ino,
        "mtime": entry.st_mtime_ns,
        "ctime": entry.st_ctime_ns,
        "atime": entry.st_atime_ns,
        "blocks": entry.st_blocks,
    }


# ---- handles -----------------------------------------------------------------------------------


def op_reset(new_root: str) -> None:
    """Close every slot and mapping and work below another directory from now on."""
    global root
    for number in list(maps):
        op_unmap(number)
    for slot in list(slots):
        try:
            os.close(slots.pop(slot))
        except OSError:
            pass
    root = new_root


def _fd(slot: int) -> int:
    if slot not in slots:
        raise OSError(errno.EBADF, "empty slot")
    return slots[slot]


def op_open(slot: int, path: str, flags: str, mode: int = 0o644) -> None:
    value = flags_of(flags)
    try:
        if stat.S_ISFIFO(os.stat(at(path)).st_mode):
            value |= os.O_NONBLOCK  # an actor waits for nobody
    except OSError:
        pass
    opened = os.open(at(path), value, mode)
    if slot in slots:
        os.close(slots.pop(slot))
    slots[slot] = opened


def op_close(slot: int) -> None:
    _fd(slot)
    os.close(slots.pop(slot))


def op_dup(slot: int, to: int) -> None:
    duplicate = os.dup(_fd(slot))
    if to in slots:
        os.close(slots.pop(to))
    slots[to] = duplicate


def op_fork_exit(slot: int) -> None:
    """Fork a child that shares every descriptor and exits at once (its exit flushes them)."""
    _fd(slot)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


# ---- data --------------------------------------------------------------------------------------


def op_read(slot: int, size: int) -> dict[str, object]:
    return digest(os.read(_fd(slot), size))


def op_pread(slot: int, size: int, offset: int) -> dict[str, object]:
    return digest(os.pread(_fd(slot), size, offset))


def op_write(slot: int, seed: int, size: int) -> int:
    return os.write(_fd(slot), pattern(seed, size))


def op_pwrite(slot: int, seed: int, size: int, offset: int) -> int:
    return os.pwrite(_fd(slot), pattern(seed, size), offset)


def op_lseek(slot: int, offset: int, whence: int) -> object:
    if stat.S_ISDIR(os.fstat(_fd(slot)).st_mode):
        return "directory"  # what positions mean there is up to each filesystem
    return os.lseek(_fd(slot), offset, whence)


def _seek(slot: int, offset: int, whence: int) -> int:
    where = os.lseek(_fd(slot), 0, os.SEEK_CUR)
    try:
        return os.lseek(_fd(slot), offset, whence)
    finally:
        os.lseek(_fd(slot), where, os.SEEK_SET)


op_seek_data = functools.partial(_seek, whence=os.SEEK_DATA)
op_seek_hole = functools.partial(_seek, whence=os.SEEK_HOLE)


def op_truncate(path: str, size: int) -> None:
    os.truncate(at(path), size)


def op_ftruncate(slot: int, size: int) -> None:
    os.ftruncate(_fd(slot), size)


def op_fsync(slot: int) -> None:
    os.fsync(_fd(slot))


def op_fdatasync(slot: int) -> None:
    os.fdatasync(_fd(slot))


def op_fsync_dir(path: str) -> None:
    descriptor = os.open(at(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def op_fallocate(slot: int, mode: int, offset: int, size: int) -> None:
    _check(_libc.fallocate(_fd(slot), mode, offset, size))


def op_copy_file_range(source: int, start: int, target: int, offset: int, size: int) -> int:
    return os.copy_file_range(_fd(source), _fd(target), size, start, offset)


def op_sendfile(target: int, source: int, offset: int, size: int) -> int:
    """EINVAL where ranges of one file overlap: what arrives then is nobody's promise."""
    to = os.fstat(_fd(target))
    if os.path.samestat(to, os.fstat(_fd(source))):
        appends = fcntl.fcntl(_fd(target), fcntl.F_GETFL) & os.O_APPEND
        position = to.st_size if appends else os.lseek(_fd(target), 0, os.SEEK_CUR)
        if abs(position - offset) < size:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.sendfile(_fd(target), _fd(source), offset, size)


# ---- mappings ----------------------------------------------------------------------------------


def _map(slot: int, length: int, kind: str, protection: str) -> int:
    address = _libc.mmap(None, length, _PROT[protection], _MAP[kind], _fd(slot), 0)
    if address is None or address == c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def _inside(slot: int, offset: int, size: int, unit: int = _PAGE) -> bool:
    """Whether that lies within the file, rounded up to `unit`; beyond its page is a SIGBUS."""
    told = os.fstat(_fd(slot))
    return not stat.S_ISREG(told.st_mode) or 0 < size <= -(-told.st_size // unit) * unit - offset


def op_mmap_read(slot: int, size: int, offset: int) -> object:
    if not _inside(slot, offset, size):
        return "beyond"
    address = _map(slot, offset + size, "shared", "r")
    try:
        return digest(ctypes.string_at(address + offset, size))
    finally:
        _libc.munmap(address, offset + size)


def op_mmap_write(slot: int, seed: int, size: int, offset: int, sync: bool = False) -> object:
    """Store through a shared mapping (beyond the end it may show later or not); `sync`: msync."""
    if not _inside(slot, offset, size, 1):
        return "beyond"
    address = _map(slot, offset + size, "shared", "rw")
    try:
        ctypes.memmove(address + offset, pattern(seed, size), size)
        if sync:
            _check(_libc.msync(address, offset + size, 4))
    finally:
        _libc.munmap(address, offset + size)
    return size


def op_mmap_private(slot: int, seed: int, size: int, offset: int) -> object:
    """Store through a private mapping: the file must not change."""
    if not _inside(slot, offset, size):
        return "beyond"
    address = _map(slot, offset + size, "private", "rw")
    try:
        ctypes.memmove(address + offset, pattern(seed, size), size)
        return digest(ctypes.string_at(address + offset, size))
    finally:
        _libc.munmap(address, offset + size)


def op_map(number: int, slot: int, length: int) -> None:
    """Keep a shared mapping that outlives its descriptor."""
    op_unmap(number)
    maps[number] = (_map(slot, length, "shared", "rw"), length)


def op_store(number: int, seed: int, size: int, offset: int) -> None:
    address, length = maps[number]
    assert offset + size <= length
    ctypes.memmove(address + offset, pattern(seed, size), size)


def op_load(number: int, size: int, offset: int) -> dict[str, object]:
    address, length = maps[number]
    assert offset + size <= length
    return digest(ctypes.string_at(address + offset, size))


def op_unmap(number: int) -> None:
    if number in maps:
        address, length = maps.pop(number)
        _libc.munmap(address, length)


# ---- names -------------------------------------------------------------------------------------


def op_unlink(path: str) -> None:
    os.unlink(at(path))


def op_rename(source: str, target: str) -> None:
    os.rename(at(source), at(target))


def op_renameat2(source: str, target: str, flags: int) -> None:
    """Flags: 1 NOREPLACE, 2 EXCHANGE, 4 WHITEOUT."""
    _check(_libc.renameat2(_AT_FDCWD, at(source).encode(), _AT_FDCWD, at(target).encode(), flags))


def op_link(source: str, target: str) -> None:
    os.link(at(source), at(target), follow_symlinks=False)


def op_symlink(target: str, path: str) -> None:
    os.symlink(target, at(path))


def op_readlink(path: str) -> str:
    return os.readlink(at(path))


def op_mkdir(path: str, mode: int = 0o755) -> None:
    os.mkdir(at(path), mode)


def op_rmdir(path: str) -> None:
    os.rmdir(at(path))


def op_listdir(path: str) -> list[str]:
    return sorted(os.listdir(at(path)))


def op_scandir(path: str) -> list[tuple[str, bool, bool, bool]]:
    """Names with their kinds as the directory itself tells them (d_type)."""
    with os.scandir(at(path)) as entries:
        return sorted(
            (
                entry.name,
                entry.is_file(follow_symlinks=False),
                entry.is_dir(follow_symlinks=False),
                entry.is_symlink(),
            )
            for entry in entries
        )


def op_access(path: str, mode: int) -> bool:
    return os.access(at(path), mode)


# ---- attributes --------------------------------------------------------------------------------


def op_stat(path: str) -> dict[str, object]:
    return attributes(os.stat(at(path)))


def op_lstat(path: str) -> dict[str, object]:
    return attributes(os.lstat(at(path)))


def op_fstat(slot: int) -> dict[str, object]:
    return attributes(os.fstat(_fd(slot)))


def op_chmod(path: str, mode: int) -> None:
    os.chmod(at(path), mode)


def op_fchmod(slot: int, mode: int) -> None:
    os.fchmod(_fd(slot), mode)


def op_chown(path: str, uid: int, gid: int, follow: bool = True) -> None:
    os.chown(at(path), uid, gid, follow_symlinks=follow)


def op_fchown(slot: int, uid: int, gid: int) -> None:
    os.fchown(_fd(slot), uid, gid)


def op_utimens(path: str, access: int, change: int, follow: bool = True) -> None:
    os.utime(at(path), ns=(access, change), follow_symlinks=follow)


def op_futimens(slot: int, access: int, change: int) -> None:
    os.utime(_fd(slot), ns=(access, change))


def op_touch(path: str) -> None:
    """Times to now (UTIME_NOW)."""
    os.utime(at(path))


def op_umask(mask: int) -> None:
    os.umask(mask)


def op_setxattr(path: str, name: str, value: str, flags: int = 0) -> None:
    os.setxattr(at(path), name, value.encode(), flags)


def op_getxattr(path: str, name: str) -> str:
    return os.getxattr(at(path), name).decode()


def op_listxattr(path: str) -> list[str]:
    return sorted(name for name in os.listxattr(at(path)) if name.startswith("user."))


def op_removexattr(path: str, name: str) -> None:
    os.removexattr(at(path), name)


# ---- locks -------------------------------------------------------------------------------------


def _lock(kind: str) -> int:
    return fcntl.LOCK_UN if kind == "UN" else getattr(fcntl, "LOCK_" + kind) | fcntl.LOCK_NB


def op_flock(slot: int, kind: str) -> None:
    """Kind: SH, EX or UN; never waits."""
    fcntl.flock(_fd(slot), _lock(kind))


def op_lockf(slot: int, kind: str, size: int, offset: int) -> None:
    fcntl.lockf(_fd(slot), _lock(kind), size, offset)


# ---- trees -------------------------------------------------------------------------------------


def op_tree(path: str = "") -> dict[str, dict[str, object]]:
    """Everything below a directory: attributes, content digests, targets, user attributes."""
    seen: dict[str, dict[str, object]] = {}
    top = at(path)
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            full = os.path.join(folder, name)
            seen[os.path.relpath(full, top)] = describe(full)
    return seen


def describe(full: str) -> dict[str, object]:
    entry = os.lstat(full)
    told = attributes(entry)
    if stat.S_ISLNK(entry.st_mode):
        told["target"] = os.readlink(full)
        return told
    if stat.S_ISREG(entry.st_mode):
        with open(full, "rb", buffering=0) as file:
            whole = hashlib.sha1()
            while block := file.read(1 << 20):
                whole.update(block)
        told["sha"] = whole.hexdigest()[:16]
    names = [n for n in os.listxattr(full) if n.startswith("user.")]
    told["xattrs"] = {n: os.getxattr(full, n).decode(errors="replace") for n in sorted(names)}
    return told


def op_become(uid: int, gid: int, groups: list[int]) -> None:
    """Give up root."""
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)


def answer(command: list[object]) -> dict[str, object]:
    """Carry out one command."""
    handler = globals().get(f"op_{command[0]}")
    if handler is None:
        return {"bug": f"no operation {command[0]!r}"}
    try:
        return {"ok": handler(*command[1:])}
    except OSError as error:
        return {"errno": errno.errorcode.get(error.errno or 0, str(error))}
    except Exception as error:
        return {"bug": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
