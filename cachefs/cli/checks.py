"""What can be known to be wrong before anything is mounted: MountErrors that say what to do."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from cachefs.config import Settings
from cachefs.errors import MountError
from cachefs.fuse import kernelmount

_PATIENCE = 5.0
"""Seconds that a warm tier's filesystem may take to answer."""


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
    _each_once(settings.cache.dirs)
    for path in settings.cache.dirs:
        _outside(path, "cache directory", mountpoint)
        if store is not None:
            _apart(path, "cache directory", store, "store")
        _writable(path)
    if settings.tiers.warm is not None:
        _tier(settings.tiers.warm, store, settings.cache.dirs, mountpoint)


def _tier(path: Path, store: Path | None, caches: Sequence[Path], mountpoint: str) -> None:
    """A warm tier that can never work is refused; one that is away, or does not answer for now, is
    the daemon's affair."""
    refused: list[MountError] = []

    def look() -> None:
        try:
            _outside(path, "warm tier", mountpoint)
            for cache in caches:
                _apart(path, "warm tier", cache, "cache directory")
            if store is not None:
                _apart(path, "warm tier", store, "store")
            if path.exists() and not path.is_dir():
                raise MountError(f"the warm tier {path} is not a directory", hint="name one")
        except MountError as error:
            refused.append(error)
        except OSError:
            pass

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(_PATIENCE)
    if refused:
        raise refused[0]


def _apart(one: Path, what: str, other: Path, other_what: str) -> None:
    """Each is read as a whole: what lies in a store's directory is an object."""
    for inner, name, outer, outer_name in (
        (one, what, other, other_what),
        (other, other_what, one, what),
    ):
        if inner.resolve().is_relative_to(outer.resolve()):
            raise MountError(
                f"the {name} {inner} lies inside the {outer_name} {outer}",
                hint="give it a place of its own",
            )


def _outside(path: Path, what: str, mountpoint: str) -> None:
    # The text is compared first: to resolve a path inside of a mount asks its daemon.
    top = Path(mountpoint)
    if path.is_relative_to(top) or path.resolve().is_relative_to(top):
        hint = "give it a place of its own"
        raise MountError(f"the {what} {path} lies inside the mountpoint {mountpoint}", hint=hint)
    if top.is_relative_to(path.resolve()):
        hint = "give it a place of its own"
        raise MountError(f"the mountpoint {mountpoint} lies inside the {what} {path}", hint=hint)


def _each_once(paths: Sequence[Path]) -> None:
    resolved = [path.resolve() for path in paths]
    for number, path in enumerate(resolved):
        if path in resolved[:number]:
            raise MountError(
                f"cache directory {paths[number]} is given twice", hint="give each device once"
            )


def _writable(path: Path) -> None:
    hint = "choose another one with --cache-dir"
    if path.exists() and not path.is_dir():
        raise MountError(f"cache directory {path} is not a directory", hint=hint)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as exc:
        raise MountError(
            f"cache directory {path} is not writable: {exc.strerror}", hint=hint
        ) from None
