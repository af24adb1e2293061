"""Is a file open for writing anywhere? Answered by asking the kernel for a read lease.

A read lease (fcntl F_SETLEASE F_RDLCK) is granted only while nobody has the file open for writing,
in any process, passthrough writers and shared mappings included. FLUSH requests cannot tell that: a
forked child's exit sends one while the parent writes on.

Limits: the asking process must not hold a write descriptor of that file itself, and must own the
file or have CAP_LEASE. Network filesystems may know no leases: `LeaseUnsupported`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path

_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EACCES}


class LeaseUnsupported(OSError):
    """This filesystem (or this user) cannot ask for leases: nobody knows who has the file open."""


def writer_open(path: str | Path) -> bool:
    """True while any process has the file at `path` open for writing. Costs three system calls."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return _writer_open_fd(fd)
    finally:
        os.close(fd)


def _writer_open_fd(fd: int) -> bool:
    # Who opens for writing in the instant between grant and release breaks the lease, and the
    # kernel tells the holder by a signal: by default SIGIO, which ends a process. SIGURG is
    # ignored.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as err:
        if err.errno == errno.EAGAIN:
            return True
        if err.errno in _UNSUPPORTED:
            raise LeaseUnsupported(err.errno, "no read leases on this filesystem") from err
        raise
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
