"""The daemon's side of the movers: jobs out, results back, dead movers replaced.

    async with open_movers(settings, processes=2, threads=8) as pool:
        info = await pool.call("put", key=..., body=FileRange(...))

Invariants (everything runs in the trio thread, so nothing needs a lock):
- a job is waiting for a slot, or with one mover that has fewer than `threads` jobs of its lane, or
  done, and in one of these only;
- a slot belongs to the job, not to who waits for it: a cancelled call frees it only when the mover
  answers, so movers never get more work than they have threads;
- only a mover's writer task writes to its socket, so cancelling a call cannot cut a message in two;
- a job whose mover died goes to another one, until MAX_TRIES movers died with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import trio

from cachefs.errors import Transient
from cachefs.flush import wire
from cachefs.store.base import Capabilities

MAX_TRIES = 3
FIRST_RESTART_DELAY = 0.05
MAX_RESTART_DELAY = 5.0
"""Seconds before a dead mover is replaced, doubling while replacements die young as well."""
YOUNG = 10.0
"""Seconds a mover must live for its death to count as an accident."""
EXIT_GRACE = 1.0
"""Seconds a mover has to end by itself once its socket is closed."""
RECEIVE = 64 * 1024

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Task:
    """A job and who waits for it."""

    job: wire.Job
    ended: trio.Event = field(default_factory=trio.Event)
    result: wire.Done | None = None
    mover: _Mover | None = None
    tries: int = 0
    abandoned: bool = False

    @property
    def lane(self) -> bool:
        """Jobs that send data have slots of their own, so that reads never queue behind them."""
        return self.job.method in wire.SENDING


class _Mover:
    """One process, its socket, and the jobs it has."""

    def __init__(self, settings: Mapping[str, Any], threads: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs.fileno(), threads)
        self.pid = self._process.pid
        self.tasks: dict[int, _Task] = {}
        ours.setblocking(False)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        self._outbox, self._unsent = trio.open_memory_channel[bytes](math.inf)
        self.send(dict(settings))

    def send(self, message: object) -> None:
        """Queue a message; it is lost if the mover is dead."""
        self._outbox.send_nowait(wire.pack(message))

    def load(self, lane: bool) -> int:
        """Jobs of a lane that this mover has."""
        return sum(task.lane is lane for task in self.tasks.values())

    async def read(self, take: Callable[[wire.Done], None]) -> None:
        """Pass on what the mover answers, until it ends."""
        buffer = bytearray()
        with contextlib.suppress(trio.BrokenResourceError):
            while piece := await self._stream.receive_some(RECEIVE):
                buffer += piece
                for body in wire.take_frames(buffer):
                    take(wire.unpack(body))

    async def write(self) -> None:
        """Task: send what is queued."""
        with contextlib.suppress(trio.BrokenResourceError):
            async for data in self._unsent:
                await self._stream.send_all(data)

    async def end(self) -> int:
        """Close the socket and wait for the process, killing it if it lingers; its exit status."""
        with trio.CancelScope(shield=True):
            await self._stream.aclose()
            watch = os.pidfd_open(self.pid)  # not reaped yet, so it is there even when it ended
            with trio.move_on_after(EXIT_GRACE):
                await trio.lowlevel.wait_readable(watch)
            os.close(watch)
            self._process.kill()
        return self._process.wait()


class MoverPool:
    """Carries out methods of `ObjectStore` in mover processes."""

    def __init__(self, settings: Mapping[str, Any], threads: int) -> None:
        self._settings = dict(settings)
        self._threads = threads
        self._movers: list[_Mover] = []
        self._waiting: dict[bool, deque[_Task]] = {False: deque(), True: deque()}
        self._numbers = iter(range(2**63))
        self._closed = False
        self.restarts = 0
        """Movers that died and were replaced."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the movers that run now."""
        return [mover.pid for mover in self._movers]

    @property
    def pending(self) -> int:
        """Jobs waiting or being carried out."""
        waiting = sum(len(tasks) for tasks in self._waiting.values())
        return waiting + sum(len(mover.tasks) for mover in self._movers)

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """The result of an ObjectStore method. Raises what it raised: StoreError, or CacheError for
        trouble with a local file; anything unforeseen is Transient. When this is cancelled the job
        is given up: whether it took effect is then unknown."""
        if self._closed:
            raise Transient(f"{method}: the movers are shut down")
        task = _Task(wire.Job(next(self._numbers), method, arguments))
        self._waiting[task.lane].append(task)
        self._dispatch(task.lane)
        try:
            await task.ended.wait()
        except trio.Cancelled:
            self._abandon(task)
            raise
        assert task.result is not None
        if task.result.error is not None:
            raise task.result.error
        return task.result.value

    async def restart_clients(self) -> None:
        """Make every mover read credentials and profile anew before its next request."""
        await trio.lowlevel.checkpoint()
        for mover in self._movers:
            mover.send(wire.Reload())

    async def keep_one(self) -> None:
        """Task: one mover after the other, forever."""
        delay = FIRST_RESTART_DELAY
        while True:
            born = trio.current_time()
            await self._live()
            self.restarts += 1
            young = trio.current_time() - born < YOUNG
            delay = min(delay * 2, MAX_RESTART_DELAY) if young else FIRST_RESTART_DELAY
            await trio.sleep(delay)

    def shut_down(self) -> None:
        """Fail whatever is still waiting: nobody will carry it out."""
        self._closed = True
        tasks = [task for waiting in self._waiting.values() for task in waiting]
        tasks += [task for mover in self._movers for task in mover.tasks.values()]
        for task in tasks:
            _fail(task, "the movers are shut down")

    async def _live(self) -> None:
        """One mover's life, from start to death."""
        try:
            mover = _Mover(self._settings, self._threads)
        except OSError as error:
            log.warning("mover cannot be started", error=str(error))
            return
        self._movers.append(mover)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mover.write)
                self._dispatch_all()
                await mover.read(partial(self._finish, mover))
                nursery.cancel_scope.cancel()
        finally:
            self._movers.remove(mover)
            status = await mover.end()
            if not self._closed:
                self._bury(mover, status)

    def _bury(self, mover: _Mover, status: int) -> None:
        """Give a dead mover's jobs out again."""
        log.warning("mover died", pid=mover.pid, status=status, jobs=len(mover.tasks))
        for task in reversed(mover.tasks.values()):
            task.tries += 1
            task.mover = None
            if task.tries >= MAX_TRIES or task.job.method in wire.UNREPEATED:
                _fail(task, f"{task.tries} movers died with this job in hand")
            elif not task.abandoned:
                self._waiting[task.lane].appendleft(task)
        self._dispatch_all()

    def _finish(self, mover: _Mover, done: wire.Done) -> None:
        task = mover.tasks.pop(done.number)
        task.result = done
        task.ended.set()
        if task.job.method == "probe" and done.error is None:
            self._spread(done.value, mover)
        self._dispatch(task.lane)

    def _spread(self, capabilities: Capabilities, origin: _Mover) -> None:
        """One probe serves all movers, those to come included."""
        self._settings["capabilities"] = capabilities
        for mover in self._movers:
            if mover is not origin:
                mover.send(wire.Adopt(capabilities))

    def _dispatch_all(self) -> None:
        for lane in self._waiting:
            self._dispatch(lane)

    def _dispatch(self, lane: bool) -> None:
        """Give waiting jobs to the movers with least to do."""
        waiting = self._waiting[lane]
        while waiting and self._movers:
            mover = min(self._movers, key=lambda each: each.load(lane))
            if mover.load(lane) >= self._threads:
                return
            task = waiting.popleft()
            task.mover = mover
            mover.tasks[task.job.number] = task
            mover.send(task.job)

    def _abandon(self, task: _Task) -> None:
        task.abandoned = True
        if task.mover is not None:
            task.mover.send(wire.Abandon(task.job.number))
        elif task in self._waiting[task.lane]:
            self._waiting[task.lane].remove(task)


@asynccontextmanager
async def open_movers(
    store: Mapping[str, Any], processes: int, threads: int
) -> AsyncIterator[MoverPool]:
    """A pool of `processes` movers, each with `threads` threads that send and as many that read.

    `store` are the plain values of the settings' section `store`.
    """
    connections = max(2 * threads, int(store.get("max_connections") or 0))
    pool = MoverPool({**store, "max_connections": connections}, threads)
    async with trio.open_nursery() as nursery:
        for _ in range(processes):
            nursery.start_soon(pool.keep_one)
        try:
            yield pool
        finally:
            pool.shut_down()
            nursery.cancel_scope.cancel()


def _spawn(fd: int, threads: int) -> subprocess.Popen[bytes]:
    """Start a process. Directly, not in a thread: a mover asks the kernel to end it with the thread
    that started it."""
    package_root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    main = threading.current_thread() is threading.main_thread()
    return subprocess.Popen(
        [
            sys.executable, "-P", "-m", "cachefs.flush.mover",
            str(fd), str(threads), "die-with-parent" if main else "stay",
        ],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def _fail(task: _Task, why: str) -> None:
    number, method = task.job.number, task.job.method
    task.result = wire.Done(number, error=Transient(f"{method}: {why}"))
    task.ended.set()
