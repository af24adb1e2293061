"""A daemon to supervise: speaks the FUSE protocol by itself and misbehaves on demand.

It keeps files flat in the first cache directory and holds no state in memory, so that a successor
continues where it was killed. It has the real daemon's command line, exit codes and control
operations. The environment variable TOYDAEMON holds a JSON object of misbehaviour, see `Plan`.
"""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import select
import signal
import stat
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from cachefs.observe.control import Handler, Progress, serve_control

IN_HEADER = struct.Struct("=IIQQIIIHH")
OUT_HEADER = struct.Struct("=IiQ")
ATTR = struct.Struct("=6Q10I")
(LOOKUP, FORGET, GETATTR, SETATTR, UNLINK, OPEN, READ, WRITE, STATFS, RELEASE) = (
    1, 2, 3, 4, 10, 14, 15, 16, 17, 18,
)  # fmt: skip
FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, CREATE = 20, 25, 26, 27, 28, 29, 35
BATCH_FORGET = 42
INIT_EXT, HAS_RESEND = 1 << 30, 1 << 7
RESEND_BIT = 1 << 63
NOTIFY_RESEND = 7
ROOT = 1
EXIT_UPGRADE = 75


@dataclass
class Plan:
    """What goes wrong, by epoch (number of restarts) where that makes sense."""

    fail: dict[str, list[Any]] = field(default_factory=dict)
    """epoch -> [message, exit code] to report instead of ready."""
    refuse: list[int] = field(default_factory=list)
    """Epochs that report that no restart can help."""
    die: list[int] = field(default_factory=list)
    """Epochs that end before they report anything."""
    hang: list[int] = field(default_factory=list)
    """Epochs that never report."""
    no_resend: bool = False
    drain_seconds: float = 0.0
    drain_code: int = 0
    deaf: bool = False
    """Ignore SIGTERM, have no control socket."""
    socket: str = ""


class Toy:
    def __init__(self, fuse_fd: int, state_fd: int, directory: Path, plan: Plan) -> None:
        self.fd = fuse_fd
        self.state = mmap.mmap(state_fd, 4096)
        self.directory = directory
        self.plan = plan
        self.serving = threading.Lock()
        """Held while a request is between read and reply."""
        self.epoch = struct.unpack_from("=I", self.state, 12)[0]

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        os.set_blocking(self.fd, False)
        while True:
            events = poll.poll()
            with self.serving:
                try:
                    request = os.read(self.fd, (1 << 20) + 4096)
                except BlockingIOError:
                    continue
                except OSError as exc:
                    if exc.errno == errno.ENODEV or any(e & select.POLLERR for _, e in events):
                        return
                    continue
                self.handle(request)

    def handle(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        body = request[IN_HEADER.size :]
        if opcode in (FORGET, BATCH_FORGET):
            return
        try:
            self.reply(unique, 0, self.answer(opcode, node, body))
        except OSError as exc:
            self.reply(unique, -(exc.errno or errno.EIO), b"")

    def reply(self, unique: int, error: int, body: bytes) -> None:
        os.write(self.fd, OUT_HEADER.pack(OUT_HEADER.size + len(body), error, unique) + body)

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == INIT:
            return self.init(body)
        if opcode in (LOOKUP, CREATE, UNLINK):
            return self.by_name(opcode, body)
        if opcode == GETATTR:
            return struct.pack("=QII", 0, 0, 0) + self.attributes(node)
        if opcode == SETATTR:
            valid, _, _, size = struct.unpack_from("=IIQQ", body)
            if valid & 8:
                os.truncate(self.path(node), size)
            return struct.pack("=QII", 0, 0, 0) + self.attributes(node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("=QIi", node, 0, 0)
        if opcode in (READ, WRITE):
            return self.transfer(opcode, node, body)
        if opcode == STATFS:
            return struct.pack(
                "=5Q4I24x", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0
            )
        if opcode in (READDIR, RELEASE, RELEASEDIR, FLUSH, FSYNC):
            return b""
        raise OSError(errno.ENOSYS, "")

    def init(self, body: bytes) -> bytes:
        major, minor, readahead, offered, offered2 = struct.unpack_from("=5I", body)
        resend = bool(offered & INIT_EXT and offered2 & HAS_RESEND) and not self.plan.no_resend
        flags = (INIT_EXT if resend else 0) | 1 << 5  # BIG_WRITES
        if resend:
            struct.pack_into("=I", self.state, 8, 1)
        flags2 = HAS_RESEND if resend else 0
        limits = (0, 0, 1 << 17, 1, 0, 0, flags2)
        return struct.pack("=IIIIHHIIHHI28x", major, min(minor, 38), readahead, flags, *limits)

    def by_name(self, opcode: int, body: bytes) -> bytes:
        name = os.fsdecode((body[16:] if opcode == CREATE else body).split(b"\0")[0])
        path = self.directory / name
        if opcode == UNLINK:
            path.unlink()
            return b""
        if opcode == CREATE:
            if name.startswith("slow") and self.epoch == 0:
                time.sleep(3600)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        node = path.stat().st_ino
        entry = struct.pack("=4Q2I", node, 0, 0, 0, 0, 0) + self.attributes(node)
        return entry + (struct.pack("=QIi", node, 0, 0) if opcode == CREATE else b"")

    def transfer(self, opcode: int, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        fd = os.open(self.path(node), os.O_RDWR)
        try:
            if opcode == READ:
                return os.pread(fd, size, offset)
            return struct.pack("=II", os.pwrite(fd, body[40 : 40 + size], offset), 0)
        finally:
            os.close(fd)

    def path(self, node: int) -> Path:
        if node == ROOT:
            return self.directory
        for entry in os.scandir(self.directory):
            if entry.inode() == node:
                return Path(entry.path)
        raise OSError(errno.ESTALE, "")

    def attributes(self, node: int) -> bytes:
        st = self.path(node).stat()
        mode = st.st_mode | (0o755 if stat.S_ISDIR(st.st_mode) else 0o644)
        times = (int(st.st_atime), int(st.st_mtime), int(st.st_ctime))
        rest = (0, 0, 0, mode, st.st_nlink, 0, 0, 0, 4096, 0)
        return ATTR.pack(node, st.st_size, st.st_blocks, *times, *rest)

    def leave(self, code: int) -> None:
        """Exit between two requests."""
        self.serving.acquire()
        sys.stderr.flush()
        os._exit(code)

    def drain(self) -> int:
        time.sleep(self.plan.drain_seconds)
        return self.plan.drain_code


def control(toy: Toy, socket_path: str) -> None:
    """Serve the control socket in a thread of its own."""

    def leave_soon(code: int) -> None:
        threading.Timer(0.1, toy.leave, [code]).start()

    async def unmount(args: dict[str, Any], progress: Progress) -> dict[str, int]:
        await progress({"files_left": 2, "bytes_left": 10})
        await trio.sleep(min(toy.plan.drain_seconds, args.get("drain_timeout") or 3600))
        leave_soon(toy.plan.drain_code)
        left = 2 if toy.plan.drain_code else 0
        return {"files_left": left, "bytes_left": left * 5}

    async def upgrade(_args: dict[str, Any], _progress: Progress) -> dict[str, Any]:
        leave_soon(EXIT_UPGRADE)
        return {}

    handlers: dict[str, Handler] = {"unmount": unmount, "upgrade": upgrade}
    threading.Thread(
        target=lambda: trio.run(serve_control, socket_path, handlers), daemon=True
    ).start()


def report(ready_fd: int, **fields: object) -> None:
    os.write(ready_fd, json.dumps(fields).encode() + b"\n")
    os.close(ready_fd)


def misbehave(plan: Plan, epoch: int, ready_fd: int) -> None:
    if epoch in plan.die:
        sys.exit(1)
    if epoch in plan.hang:
        time.sleep(3600)
    if epoch in plan.refuse:
        report(ready_fd, ok=False, message="takeover refused", exit_code=1, retry=False)
        sys.exit(1)
    if str(epoch) in plan.fail:
        message, code = plan.fail[str(epoch)]
        report(ready_fd, ok=False, message=message, exit_code=code)
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    for name in ("--fuse-fd", "--state-fd", "--ready-fd"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--mountpoint", required=True)
    parser.add_argument("--rehearsal", action="store_true")
    known = parser.parse_args()
    if known.rehearsal:
        return
    settings = json.loads(known.settings.read_bytes())
    plan = Plan(**json.loads(os.environ.get("TOYDAEMON", "{}")))
    toy = Toy(known.fuse_fd, known.state_fd, Path(settings["cache"]["dirs"][0]), plan)
    print(f"toy {os.getpid()} epoch {toy.epoch}", file=sys.stderr, flush=True)
    misbehave(plan, toy.epoch, known.ready_fd)
    stop = signal.SIG_IGN if plan.deaf else lambda *_: os._exit(toy.drain())
    signal.signal(signal.SIGTERM, stop)
    if not plan.deaf:
        control(toy, plan.socket)
    if toy.epoch and struct.unpack_from("=I", toy.state, 8)[0]:
        os.write(toy.fd, OUT_HEADER.pack(OUT_HEADER.size, NOTIFY_RESEND, 0))
    report(known.ready_fd, ok=True)
    toy.serve()
    sys.exit(toy.drain())


if __name__ == "__main__":
    main()
