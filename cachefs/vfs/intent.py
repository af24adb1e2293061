"""What the caller of a request is about to do, where the request does not tell.

The kernel looks a name up before it creates it, and the lookup does not say what it is for. While
the store cannot be asked, that matters: a name that is about to be made may go on as new (the
upload notices if the bucket has it), but any other must not be reported missing when it is only
unknown. And it asks for nothing to be set both for chown(-1, -1) and before a write to a file with
set-user-id. The system call that the caller sits in tells (proc_pid_syscall(5)).
"""

from __future__ import annotations

import os
import platform

_O_CREAT = os.O_CREAT

# Number of the call -> index of its flags argument; None: it creates whatever its arguments.
_CALLS: dict[str, dict[int, int | None]] = {
    "x86_64": {
        2: 1, 257: 2, 85: None,  # open, openat, creat
        83: None, 258: None, 133: None, 259: None,  # mkdir, mkdirat, mknod, mknodat
        88: None, 266: None, 86: None, 265: None,  # symlink, symlinkat, link, linkat
        82: None, 264: None, 316: None,  # rename, renameat, renameat2
    },
    "aarch64": {
        56: 2, 34: None, 33: None, 36: None, 37: None, 38: None, 276: None,
    },
}  # fmt: skip
_OWNER_CALLS = {
    "x86_64": (92, 93, 94, 260),  # chown, fchown, lchown, fchownat
    "aarch64": (55, 54),  # fchown, fchownat
}
_KNOWN = _CALLS.get(platform.machine(), {})
_CHANGES_OWNER = _OWNER_CALLS.get(platform.machine(), ())


def is_creating(pid: int) -> bool:
    """Whether thread `pid` is in a system call that makes a name; False if that cannot be told."""
    number, arguments = _system_call(pid)
    if number not in _KNOWN:
        return False
    flags_at = _KNOWN[number]
    return flags_at is None or bool(arguments[flags_at] & _O_CREAT)


def is_changing_owner(pid: int) -> bool:
    """Whether thread `pid` is in a chown of some kind; False if that cannot be told."""
    return _system_call(pid)[0] in _CHANGES_OWNER


def _system_call(pid: int) -> tuple[int, list[int]]:
    """(number, arguments) of the call that a thread is in; -1 if there is none."""
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as source:
            number, *arguments = source.read().split()
        return int(number), [int(each, 16) for each in arguments]
    except (OSError, ValueError):
        return -1, []
