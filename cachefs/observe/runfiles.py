"""Run files: how a command finds the daemon that serves a path.

`<run dir>/<digest of the mountpoint>.json` names the processes, the control socket beside it, the
cache directories and the log. The run directory is /run/cachefs for root, else
$XDG_RUNTIME_DIR/cachefs. Which mount a path belongs to is asked of the kernel's mount table without
touching the mount itself, which may hang while no daemon serves it. Standard library only: the
supervisor imports this.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

FSTYPE = "fuse.cachefs"
MOUNTINFO = "/proc/self/mountinfo"
_ROOT_DIR = "/run/cachefs"
_USERS_DIR = "/run/user"


@dataclass(frozen=True, slots=True)
class RunFile:
    """What is known about the daemon of one mount."""

    mountpoint: str
    pid: int
    """Daemon; changes when another takes over."""
    supervisor_pid: int
    """0: none."""
    socket: str
    cache_dirs: tuple[str, ...] = ()
    log: str = ""
    """Log file; empty: standard error."""


@dataclass(frozen=True, slots=True)
class Location:
    """A path inside a mount."""

    mountpoint: str
    path: str
    """Absolute, below `mountpoint` as the daemon knows it, also when asked by a bind mount."""


def run_dir() -> Path:
    """Where this user's run files live. It need not exist."""
    if os.geteuid() == 0:
        return Path(_ROOT_DIR)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "cachefs"
    return Path(tempfile.gettempdir()) / f"cachefs-{os.geteuid()}"


def memory_dirs() -> tuple[Path, Path]:
    """Where this user's files may lie that belong into memory: /run is not in every container."""
    return run_dir(), Path(f"/dev/shm/cachefs-{os.geteuid()}")


def run_path(mountpoint: str) -> Path:
    """This user's run file for a mountpoint."""
    return run_dir() / f"{_digest(mountpoint)}.json"


def socket_path(mountpoint: str) -> Path:
    """The control socket for a mountpoint, beside its run file."""
    return run_dir() / f"{_digest(mountpoint)}.sock"


def write(run: RunFile) -> Path:
    """Create or replace the run file in one step.

    Raises OSError, PermissionError when the run directory belongs to someone else.
    """
    path = run_path(run.mountpoint)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path.parent} is not a directory of this user")
    fd, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with open(fd, "w", encoding="ascii") as file:
        json.dump(asdict(run), file)
    os.rename(fresh, path)
    return path


def read(mountpoint: str) -> RunFile | None:
    """The run file of a mountpoint, this user's first; None when there is none."""
    name = f"{_digest(mountpoint)}.json"
    for directory in _search_dirs():
        run = _load(directory / name)
        if run is not None and run.mountpoint == mountpoint:
            return run
    return None


def read_all() -> list[RunFile]:
    """All run files in sight, by mountpoint; of two for one mountpoint, this user's."""
    found: dict[str, RunFile] = {}
    for directory in _search_dirs():
        for path in sorted(directory.glob("*.json")):
            run = _load(path)
            if run is not None:
                found.setdefault(run.mountpoint, run)
    return [found[mountpoint] for mountpoint in sorted(found)]


def remove(mountpoint: str) -> None:
    """Forget a mount that has ended: run file and socket."""
    run_path(mountpoint).unlink(missing_ok=True)
    socket_path(mountpoint).unlink(missing_ok=True)


def mountpoints() -> list[str]:
    """Every cachefs mountpoint that is not covered by another mount."""
    table = list(_mounts())
    own = {mount.point for mount in table if mount.fstype == FSTYPE and mount.root == "/"}
    return sorted(point for point in own if _covering(table, point).fstype == FSTYPE)


def locate(path: str | os.PathLike[str]) -> Location | None:
    """The mount that `path` belongs to; None when it is in none.

    Symbolic links outside of mounts are followed, links inside are left to the daemon.
    """
    table = list(_mounts())
    given = os.path.abspath(os.fspath(path))
    found = _locate(table, given)
    if found is None and given != "/":
        parent, name = os.path.split(given)
        found = _locate(table, os.path.join(os.path.realpath(parent), name))
    return found or _locate(table, os.path.realpath(given))


@dataclass(frozen=True, slots=True)
class _Mount:
    device: str
    root: str
    point: str
    fstype: str


def _locate(table: list[_Mount], path: str) -> Location | None:
    mount = _covering(table, path)
    if mount.fstype != FSTYPE:
        return None
    below = os.path.relpath(path, mount.point)
    for whole in table:  # a bind mount shows part of a mount elsewhere; the daemon knows the whole
        if whole.device == mount.device and whole.root == "/":
            inside = os.path.normpath(os.path.join(mount.root, below)).lstrip("/")
            return Location(whole.point, os.path.join(whole.point, inside).rstrip("/") or "/")
    return Location(mount.point, path)


def _covering(table: list[_Mount], path: str) -> _Mount:
    """The mount a path resolves to: the longest prefix, of equals the one mounted last."""
    best = _Mount("", "/", "/", "")
    for mount in table:
        inside = mount.point == "/" or path == mount.point or path.startswith(f"{mount.point}/")
        if inside and len(mount.point) >= len(best.point):
            best = mount
    return best


def _mounts() -> Iterator[_Mount]:
    """Format: proc_pid_mountinfo(5): id parent major:minor root point options... - fstype ..."""
    with open(MOUNTINFO, encoding="utf-8", errors="surrogateescape", newline="\n") as table:
        for line in table:
            fields_, found, tail = line.partition(" - ")
            columns = fields_.split(" ")
            if found and len(columns) >= 6:
                root, point = _unescape(columns[3]), _unescape(columns[4])
                yield _Mount(columns[2], root, point, tail.split(" ", 1)[0])


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _digest(mountpoint: str) -> str:
    return hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]


def _search_dirs() -> list[Path]:
    """Own directory first, then root's; root also sees those of logged-in users."""
    directories = [run_dir(), Path(_ROOT_DIR)]
    if os.geteuid() == 0:
        directories += sorted(Path(_USERS_DIR).glob("*/cachefs"))
    return directories


def _load(path: Path) -> RunFile | None:
    """None for a file that is missing, out of reach, not a run file, or of a user not to trust."""
    try:
        # O_NONBLOCK: root looks into directories of users, where a FIFO may lie in wait.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, encoding="ascii") as file:
            found = os.fstat(fd)
            trusted = os.geteuid() == 0 or found.st_uid in (0, os.geteuid())
            if not stat.S_ISREG(found.st_mode) or not trusted:
                return None
            values = json.load(file)
        names = {field.name for field in fields(RunFile)}
        known = {name: value for name, value in values.items() if name in names}
        run = RunFile(**{**known, "cache_dirs": tuple(known.get("cache_dirs", ()))})
        return run if _is_typed(run) else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _is_typed(run: RunFile) -> bool:
    texts = (run.mountpoint, run.socket, run.log, *run.cache_dirs)
    return all(isinstance(each, str) for each in texts) and all(
        type(each) is int for each in (run.pid, run.supervisor_pid)
    )
