"""The error tree: every failure cachefs reports by design, with its errno and its retry class.

One class per kind of trouble, because three parties read it: the filesystem answers `errno` to the
caller, the flusher decides by `retry` what happens next, and the command line prints the message
and exits with `exit_code`. Messages are one line, say what failed and why, and never contain
secrets; `hint` says what to do about it. Every class survives pickling, since store errors are
raised in a mover process and handled in the daemon.

Nothing here is raised for bugs: an unexpected exception stays what it is and is mapped by the
guards at the edges (the request guard, the mover, the command line).
"""

from __future__ import annotations

import errno
from enum import StrEnum
from typing import ClassVar

NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT))
"""What a filesystem says that has no room, for anybody or for this user."""


class Retry(StrEnum):
    """What the flusher does with a job that failed. Data is kept whatever the answer."""

    NEVER = "never"
    """Repeating the same request cannot help: the caller has to decide anew."""
    SOON = "soon"
    """Passing trouble: repeat after a short, growing, jittered delay."""
    PACED = "paced"
    """The store asks for fewer requests: slow down first, then repeat."""
    SLOWLY = "slowly"
    """The store refuses; only an operator can change that. Stall, alarm, try again rarely."""
    RELOAD = "reload"
    """Read the credentials anew, then repeat."""


class CachefsError(Exception):
    """Base of all errors cachefs raises on purpose."""

    errno: int = errno.EIO
    exit_code: int = 1
    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        """What failed and why, in one line, without the hint."""
        return str(self)


class UsageError(CachefsError):
    """The command line cannot be understood."""

    errno = errno.EINVAL
    exit_code = 2


class ConfigError(CachefsError):
    """A setting is unknown or has no sense."""

    errno = errno.EINVAL
    exit_code = 2


class MountError(CachefsError):
    """The mount cannot be made, found or ended."""


class CacheError(CachefsError):
    """A cache device cannot be used."""


class CacheBusy(CacheError):
    """Another daemon holds the cache device."""

    errno = errno.EBUSY


class DeviceMissing(CacheError):
    """There is no such disk, or none that answers."""


class CacheFull(CacheError):
    """No room in the cache, and nothing that may be evicted."""

    errno = errno.ENOSPC


class CacheFileLost(CacheError):
    """A cache file is missing or shorter than the bytes that were to be read from it."""


class CacheFileDamaged(CacheError):
    """A cache file is gone, of another size, or holds other bytes than were written to it."""


class StoreError(CachefsError):
    """A request to the store failed. `outcome` is its label in the request metrics."""

    outcome: ClassVar[str] = "error"


class Throttled(StoreError):
    """The store asks for fewer requests (503 SlowDown, 429, ...)."""

    retry = Retry.PACED
    outcome = "throttled"

    def __init__(
        self, message: str = "", *, hint: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after
        """Seconds the store asked to wait, when it said so."""


class Transient(StoreError):
    """Passing trouble: 5xx, timeouts, connection resets, clock skew, a mover that died."""

    retry = Retry.SOON
    outcome = "transient"


class Contradiction(Transient):
    """The store refuses a condition that holds, by its own word: passing, or for ever (stores with
    directories take a name for taken while its directory is there, empty)."""


class StoreUnreachable(Transient):
    """No connection to the store at all: name not found, refused, no route."""

    outcome = "unreachable"


class CredentialsError(StoreError):
    """Credentials are missing, wrong or expired."""

    errno = errno.EACCES
    retry = Retry.RELOAD
    outcome = "credentials"


class Refused(StoreError):
    """The store understood and said no: permissions, no such bucket, quota, invalid request."""

    errno = errno.EACCES
    retry = Retry.SLOWLY
    outcome = "refused"


class Corrupt(StoreError):
    """Bytes did not arrive as they were sent: size or checksum differs."""

    retry = Retry.SOON
    outcome = "corrupt"


class NotFound(StoreError):
    """No object under that key."""

    errno = errno.ENOENT
    outcome = "not_found"


class NoSuchUpload(StoreError):
    """The multipart upload is unknown to the store: aborted, completed or expired."""

    outcome = "no_such_upload"


class PreconditionFailed(StoreError):
    """The object is not the one the request was made for (If-Match, If-None-Match)."""

    errno = errno.ESTALE
    outcome = "precondition_failed"
