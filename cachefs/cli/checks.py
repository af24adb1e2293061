"""What can be known to be wrong before anything is mounted: MountErrors that say what to do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cachefs.config import Settings
from cachefs.errors import MountError
from cachefs.fuse import kernelmount


def may_mount() -> None:
    """Root, and a /dev/fuse that opens."""
    if os.geteuid() != 0:
        raise MountError("only root can mount", hint="run it with sudo or as a service")
    try:
        os.close(kernelmount.open_device())
    except FileNotFoundError:
        hint = "load it with `modprobe fuse`, or start the container with `--device /dev/fuse`"
        raise MountError(f"{kernelmount.FUSE_DEVICE} is missing", hint=hint) from None
    except OSError as exc:
        hint = "a container needs `--device /dev/fuse --cap-add SYS_ADMIN`"
        what = f"{kernelmount.FUSE_DEVICE} cannot be opened: {exc.strerror}"
        raise MountError(what, hint=hint) from None


def resolve(mountpoint: str) -> str:
    """The mountpoint as the kernel will name it; whatever is mounted there is not touched."""
    try:
        return kernelmount.resolve(mountpoint)
    except OSError as exc:
        raise MountError(f"mountpoint {mountpoint}: {exc.strerror}") from None


def directory(mountpoint: str) -> bool:
    """The mountpoint is a directory; True if it holds files, which the mount will hide."""
    try:
        return bool(os.listdir(mountpoint))
    except FileNotFoundError:
        hint = f"create it with `mkdir -p {mountpoint}`"
        raise MountError(f"mountpoint {mountpoint} does not exist", hint=hint) from None
    except NotADirectoryError:
        hint = "name a directory"
        raise MountError(f"mountpoint {mountpoint} is not a directory", hint=hint) from None
    except OSError as exc:
        raise MountError(f"mountpoint {mountpoint}: {exc.strerror}") from None


def places(settings: Settings, mountpoint: str) -> None:
    """Cache directories can be written; they, the store and the mount lie apart."""
    store = None
    if settings.store.url.startswith("file://"):
        store = Path(settings.store.url.removeprefix("file://"))
        _outside(store, "store", mountpoint)
    for path in settings.cache.dirs:
        _outside(path, "cache directory", mountpoint)
        if store is not None:
            _apart(path.resolve(), store.resolve())
        _writable(path)


def _apart(cache: Path, store: Path) -> None:
    """What lies in a store's directory is an object."""
    if cache.is_relative_to(store):
        hint = "give the cache a place of its own"
        raise MountError(f"the cache directory {cache} lies inside the store {store}", hint=hint)
    if store.is_relative_to(cache):
        hint = "give the cache a place of its own"
        raise MountError(f"the store {store} lies inside the cache directory {cache}", hint=hint)


def _outside(path: Path, what: str, mountpoint: str) -> None:
    # The text is compared first: to resolve a path inside of a mount asks its daemon.
    top = Path(mountpoint)
    if path.is_relative_to(top) or path.resolve().is_relative_to(top):
        hint = "give it a place of its own"
        raise MountError(f"the {what} {path} lies inside the mountpoint {mountpoint}", hint=hint)
    if top.is_relative_to(path.resolve()):
        hint = "give it a place of its own"
        raise MountError(f"the mountpoint {mountpoint} lies inside the {what} {path}", hint=hint)


def _writable(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as exc:
        raise MountError(
            f"cache directory {path} is not writable: {exc.strerror}",
            hint="choose another one with --cache-dir",
        ) from None
