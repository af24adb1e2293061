"""A mover process: carries out store requests for the daemon, so that bytes never cross it.

    python -m cachefs.flush.mover FD THREADS die-with-parent|stay

The main thread reads messages from the socket FD and hands jobs to two sets of threads, THREADS
each: one for jobs that send data and one for all others, so that somebody waiting for a read or a
lookup never queues behind uploads. The first message is the store's settings. The process ends when
the socket does, whatever its threads are doing: every job is idempotent, and the daemon gives it
out again.

Signals that a terminal or a service manager sends to all processes are ignored: the daemon still
needs its movers to drain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from cachefs.errors import CachefsError, Transient
from cachefs.flush import wire
from cachefs.store.base import ObjectStore, open_store
from cachefs.store.transfer import Abandoned, abandon_when

PR_SET_PDEATHSIG = 1


class Mover:
    """State of the process. `_lock` guards the socket's sending side and `_events`."""

    def __init__(self, sock: socket.socket, settings: dict[str, Any]) -> None:
        self._sock = sock
        self._settings = settings
        self._lock = threading.Lock()
        self._store: ObjectStore | None = None
        self._store_lock = threading.Lock()
        self._events: dict[int, threading.Event] = {}
        self._reading: queue.SimpleQueue[wire.Job] = queue.SimpleQueue()
        self._sending: queue.SimpleQueue[wire.Job] = queue.SimpleQueue()

    def start(self, threads: int) -> None:
        """Start the threads."""
        for jobs in (self._reading, self._sending):
            for _ in range(threads):
                threading.Thread(target=self._work, args=(jobs,), daemon=True).start()
        # Importing boto3 takes 0.3 s: not in the first job's time.
        threading.Thread(target=self._warm_up, daemon=True).start()

    def serve(self) -> None:
        """Take messages until the daemon is gone."""
        while (message := wire.receive(self._sock)) is not None:
            self._take(message)

    def _take(self, message: object) -> None:
        match message:
            case wire.Job(number, method, _):
                with self._lock:
                    self._events[number] = threading.Event()
                (self._sending if method in wire.SENDING else self._reading).put(message)
            case wire.Abandon(number):
                with self._lock:
                    event = self._events.get(number)
                if event is not None:
                    event.set()
            case wire.Reload():
                if self._store is not None:
                    self._store.reload()
            case wire.Adopt(capabilities):
                with self._store_lock:
                    self._settings["capabilities"] = capabilities
                    if self._store is not None:
                        self._store.adopt(capabilities)

    def _work(self, jobs: queue.SimpleQueue[wire.Job]) -> None:
        while True:
            job = jobs.get()
            self._reply(self._carry_out(job))

    def _carry_out(self, job: wire.Job) -> wire.Done:
        event = self._events[job.number]
        try:
            with abandon_when(event):
                if event.is_set():
                    raise Abandoned
                value = self._call(job)
            return wire.Done(job.number, value)
        except Abandoned:
            return wire.Done(job.number, error=Transient(f"{job.method} was abandoned"))
        except CachefsError as error:
            return wire.Done(job.number, error=error)
        except Exception as error:
            return wire.Done(job.number, error=_internal(job.method, error))

    def _call(self, job: wire.Job) -> object:
        if job.method in wire.ARITHMETIC:  # No store has to be there for that.
            from cachefs.store.crc import ARITHMETIC

            return ARITHMETIC[job.method](**job.arguments)
        return getattr(self._opened(), job.method)(**job.arguments)

    def _warm_up(self) -> None:
        with contextlib.suppress(CachefsError):  # every job will report it
            self._opened()

    def _opened(self) -> ObjectStore:
        with self._store_lock:
            if self._store is None:
                self._store = open_store(self._settings)
            return self._store

    def _reply(self, done: wire.Done) -> None:
        try:
            data = wire.pack(done)
        except Exception as error:  # pickling runs the code of whatever the result holds
            data = wire.pack(wire.Done(done.number, error=_internal("reply", error)))
        with self._lock:
            self._events.pop(done.number, None)
            try:
                self._sock.sendall(data)
            except OSError:
                os._exit(0)  # the daemon is gone


def _internal(method: str, error: Exception) -> Transient:
    """A bug, or a store that does what nobody foresaw. Data is safe: the job is tried again."""
    traceback.print_exception(error)
    text = f"{method}: internal error: {type(error).__name__}: {error}"
    return Transient(" ".join(text.split()))


def main(argv: list[str]) -> None:
    """Serve the socket given as descriptor number."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(argv[1]))
    sock.setblocking(True)
    if argv[3] == "die-with-parent":  # even if another child of the daemon inherited the socket
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(ConnectionError):
        settings = wire.receive(sock)
        if settings is not None:
            mover = Mover(sock, settings)
            mover.start(int(argv[2]))
            mover.serve()
    os._exit(0)  # threads may be in the middle of requests nobody waits for


if __name__ == "__main__":
    main(sys.argv)
