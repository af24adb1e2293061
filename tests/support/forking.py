"""Processes of the product by fork instead of exec, from one that has loaded their code.

A supervisor, a daemon and a mover spend a second of processor time on imports before they do
anything. `install` replaces `subprocess.Popen` in a forked command: a child that would be one of
these three becomes a fork of the process that starts it. Parent, descriptors, session, environment,
working directory, signals and `/proc/PID/cmdline` are what exec would have made of them.

Processes whose environment has a say before `main` (LD_PRELOAD, failpoints) are started in the real
way, and so is everything in commands that run with CACHEFS_TEST_STARTS=real.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

PADDING = "-" * 4096
"""A last argument for the process that forks: room for the longest command line of a child."""
_CODE = (
    "cachefs.daemon.__main__", "cachefs.daemon.serve", "cachefs.flush.mover",
    "cachefs.store.directory", "cachefs.store.s3", "cachefs.supervisor", "awscrt.checksums",
    "encodings.ascii", "encodings.idna",
)  # fmt: skip
_EARLY = re.compile(r"LD_|CACHEFS_FAILPOINTS")
"""Beginnings of the names of variables that have their effect before `main`."""


def _supervisor() -> int:
    from cachefs.supervisor import main

    return main()


def _daemon() -> int:
    from cachefs.daemon.__main__ import main

    return main(sys.argv[1:])


def _mover() -> int:
    from cachefs.flush.mover import main

    main(sys.argv)
    return 0


_MAINS: dict[str, Callable[[], int]] = {
    "cachefs.supervisor": _supervisor,
    "cachefs.daemon": _daemon,
    "cachefs.flush.mover": _mover,
}


def preload() -> None:
    """Load what the children need; pyfuse3 is not among it, since the tap has to come first."""
    for name in _CODE:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _build_a_client()
    _read_settings()
    gc.collect()
    gc.freeze()  # what is never looked at by a collection stays shared


def _build_a_client() -> None:
    """For what botocore loads when it is first needed, and keeps."""
    from cachefs.store.s3client import ClientSource, S3Options

    ClientSource(S3Options(bucket="none", endpoint="http://127.0.0.1:1")).get()


def _read_settings() -> None:
    """For the patterns in them, which are compiled, and kept, by whoever reads them."""
    from cachefs.config import Settings

    Settings.from_json(Settings.model_validate({"store": {"url": "s3://none"}}).to_json())


def install() -> None:
    """From now on this process forks."""
    subprocess.Popen = _Forking  # type: ignore[misc]


class _Forking(subprocess.Popen[Any]):
    """What exec does to the three kinds of processes, done by hand."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Collection[int],
        cwd: str | None,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: Any,
        gids: Any,
        uid: Any,
        umask: int,
        start_new_session: bool,
        *rest: Any,
    ) -> None:
        module = None if shell else _module(args, env)
        if module is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                restore_signals, gid, gids, uid, umask, start_new_session, *rest,
            )  # fmt: skip
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a daemon has threads
            self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            _become(module, args, env, cwd, (p2cread, c2pwrite, errwrite), pass_fds)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _module(args: Any, env: Mapping[str, str] | None) -> str | None:
    """Which of the three a command starts, if its start may be a fork."""
    words = [word for word in args if word != "-P"] if isinstance(args, list) else []
    if "--rehearsal" in words:  # asks whether code that was never loaded here would start
        return None
    if words[:2] != [sys.executable, "-m"] or words[2] not in _MAINS:
        return None
    return words[2] if early(os.environ if env is None else env) == _at_preload else None


def early(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that has its effect before `main`."""
    return {name: value for name, value in env.items() if _EARLY.match(name)}


_at_preload = early(os.environ)
"""This module is loaded by the process that everything is forked from."""


def _become(
    module: str,
    args: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | None,
    standard: Iterable[int],
    pass_fds: Collection[int],
) -> None:
    """Be the process. Does not return."""

    def main() -> int:
        _forget_signals()
        for number, fd in enumerate(standard):
            if fd >= 0:
                os.dup2(fd, number)
        _close_all_but(pass_fds)
        if cwd is not None:
            os.chdir(cwd)
        if env is not None:
            take_environment(env)
        _show_as(args)
        sys.argv = [module, *args[args.index(module) + 1 :]]
        return _MAINS[module]()

    end_as(main)


def take_environment(env: Mapping[str, str]) -> None:
    """Instead of the parent's."""
    os.environ.clear()
    os.environ.update(env)
    time.tzset()


def end_as(main: Callable[[], int]) -> NoReturn:
    """Run it in a process that was forked, and end that as the interpreter would."""
    code = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _forget_signals() -> None:
    """Handlers are the parent's; signals it ignores stay ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def _close_all_but(kept: Collection[int]) -> None:
    gc.freeze()  # the parent's objects must not close descriptors of ours with the same number
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd in kept:
            os.set_inheritable(fd, True)
        elif fd > 2:
            with contextlib.suppress(OSError):
                os.close(fd)


def _show_as(args: Sequence[str]) -> None:
    """Have /proc tell this command line (with more zeros at its end)."""
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    text = b"".join(os.fsencode(word) + b"\0" for word in args)
    assert len(text) <= len(PADDING)
    ctypes.memmove(start, text, len(text))
    ctypes.memset(start + len(text), 0, end - start - len(text))
