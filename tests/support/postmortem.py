"""What everybody is doing, for a call that does not return: read before anything is ended.

Threads in the kernel (state, wait channel, stack), requests that the daemon has not answered, and
what the daemon tells of itself on SIGUSR1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import fusectl

if TYPE_CHECKING:
    from tests.support.mounts import Mount

LOG_TAIL = 16_000
"""Characters of the log that are shown."""
_SLOTS_AT, _TABLE_AT, _SLOT = 44, 4096, 64
"""Of the in-flight table: offset of its number of slots, its own, and bytes of a slot."""
_PENDING_OR_LIVE = (2, 3)


def report(mount: Mount, *clients: int) -> str:
    """What daemon, supervisor, movers and `clients` (pids) are doing now."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        mount.reread()
    daemon, supervisor = mount.daemon_pid, mount.supervisor_pid
    lines = [f"--- {mount.path}: daemon {daemon}, supervisor {supervisor} ---", *_waiting(mount)]
    lines += requests(supervisor)
    for pid in dict.fromkeys((*clients, daemon, supervisor, *_children(daemon))):
        lines += process(pid)
    before = len(mount.log)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if daemon and mount.is_own(daemon):
            os.kill(daemon, signal.SIGUSR1)
            time.sleep(1)
    log = mount.log
    lines += ["--- log ---", log[:before][-LOG_TAIL:], "--- the daemon on itself ---", log[before:]]
    return "\n".join(lines)


def _waiting(mount: Mount) -> list[str]:
    try:
        return [f"requests without an answer, by the kernel: {fusectl.waiting(mount.path)}"]
    except (OSError, AssertionError) as error:
        return [f"the connection does not tell: {error}"]


def process(pid: int) -> Iterator[str]:
    """Each thread of a process: state, wait channel, system call, stack in the kernel."""
    folder = Path(f"/proc/{pid}")
    command = _read(folder / "cmdline").replace("\0", " ")[:150]
    yield f"--- process {pid}: {command or 'gone'} ---"
    with contextlib.suppress(OSError):
        for thread in sorted((folder / "task").iterdir()):
            state = _read(thread / "stat").rpartition(")")[2].split()[:1]
            call = _read(thread / "syscall").split()[:3]
            yield f"thread {thread.name} {state} wchan={_read(thread / 'wchan')} syscall={call}"
            stack = _read(thread / "stack").splitlines()
            yield from (f"    {line}" for line in stack[:20])


def requests(supervisor: int) -> Iterator[str]:
    """The tap's in-flight table, from the memory that the supervisor holds."""
    for fd in _descriptors(supervisor):
        with contextlib.suppress(OSError, struct.error):
            if "memfd:cachefs-tap" not in os.readlink(fd):
                continue
            yield from _in_flight(fd.read_bytes())
            return
    yield "the tap's memory is out of reach"


def _in_flight(state: bytes) -> Iterator[str]:
    slots: int = struct.unpack_from("=I", state, _SLOTS_AT)[0]
    yield f"in flight, of {slots} slots (takeovers: {struct.unpack_from('=Q', state, 16)[0]}):"
    for number in range(slots):
        at = _TABLE_AT + number * _SLOT
        told, opcode, unique, node, fh, arrival, charge, flags = struct.unpack_from(
            "=IIQQQQII", state, at
        )
        if told & 0xFF in _PENDING_OR_LIVE:
            yield (
                f"    opcode {opcode} unique {unique} node {node} fh {fh} arrival {arrival}"
                f" charge {charge:#x} flags {flags:#o}"
            )


def _descriptors(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/fd").iterdir())
    return []


def _children(pid: int) -> Iterable[int]:
    told = _read(Path(f"/proc/{pid}/task/{pid}/children")).split()
    return [int(each) for each in told]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
