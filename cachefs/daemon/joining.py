"""Becoming the one who answers the requests of a FUSE connection, and finding out beforehand
whether the code that is installed now could.

The kernel negotiates once with a mount. A daemon that would negotiate otherwise is no successor,
and neither is code that does not start; both must be known while the daemon before is still there.
So an upgrade begins with a rehearsal (`supervised.objection`): a process of the new code does what
it would do to take over, with a copy of the state that daemons share and a descriptor that leads
nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachefs.daemon.arguments import Arguments
from cachefs.daemon.storage import check_versions
from cachefs.errors import MountError
from cachefs.fuse import tap as taps

if TYPE_CHECKING:
    import pyfuse3


class CannotJoin(MountError):
    """A live connection cannot be gone on with, by no daemon of this installation."""


def join(operations: pyfuse3.Operations, fuse_fd: int, tap: taps.Tap | None, *, live: bool) -> None:
    """Answer the connection's requests with `operations` from now on. `live`: others did so before.

    Raises CannotJoin for a live one, MountError for one that is new.
    """
    import pyfuse3

    options: set[str] = {"default_permissions"}
    try:
        pyfuse3.init(operations, f"/dev/fd/{fuse_fd}", options)
    except RuntimeError as error:
        why = (tap.refusal if tap is not None else "") or str(error)
        kind = CannotJoin if live else MountError
        raise kind(f"cannot join the FUSE connection: {why}") from error


def rehearse(arguments: Arguments) -> None:
    """Raises MountError if a daemon of this code could not go on with the mount whose state this
    is a copy of, CacheError if it could not open the database."""
    check_versions(arguments.settings)
    tap = taps.load(arguments.state_fd)
    if isinstance(tap, taps.Reason):
        raise MountError(str(tap))
    tap.rehearse()
    from cachefs.fuse.ops import CacheOperations

    # Nobody asks it for anything: what is negotiated depends on its class.
    join(CacheOperations.__new__(CacheOperations), arguments.fuse_fd, tap, live=True)
