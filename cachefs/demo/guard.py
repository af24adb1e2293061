"""Run a command for as long as standard input stays open.

    python guard.py GRACE_SECONDS REMOVE COMMAND [ARGUMENT...]

Whoever starts the guard keeps the write end of its stdin. When that closes (a call to stop, or the
death of the owner, however sudden) the command gets SIGTERM, and SIGKILL after the grace. The exit
code is the command's; its process id is the one line on stdout. REMOVE are files, separated by
colons, that the command leaves behind and that are removed in the end. Unlike PR_SET_PDEATHSIG
alone this does not depend on which thread of the owner started it. Standard library only, run as a
plain file, so that it costs 10 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _die_with_guard() -> None:
    """In the child: if the guard itself is killed, so is the command."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Until stdin is closed or the command ended."""
    ended = os.pidfd_open(process.pid)
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready or not os.read(0, 4096):
            os.close(ended)
            return


def main(argv: list[str]) -> int:
    """Run `argv[3:]`; returns its exit code."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    process = subprocess.Popen(
        argv[3:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
    )
    print(process.pid, flush=True)
    os.dup2(2, 1)  # the command's pid is all that the owner reads
    _wait_for_end(process)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(float(argv[1]))
    process.kill()
    code = process.wait()
    for path in filter(None, argv[2].split(":")):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
