"""``python -m cachefs.daemon SETTINGS.json --mountpoint P --fuse-fd N --state-fd M --ready-fd R``.
With ``--standby-fd S`` instead of the three others it loads its code and waits for them there.

Order of a start: lock the cache devices, open the database, load the tap (before pyfuse3 is
imported), reach the store where the cache does not know it yet, recover, join the connection,
report ready, serve. Everything that can fail does so before the mount answers, with one line on
the ready descriptor.

Exit codes: 0 everything is in the store; 3 something remains in the cache; 75 planned upgrade;
1 failure.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys

from cachefs.daemon.arguments import CLEAN, FAILED, await_turn, parse
from cachefs.errors import CachefsError
from cachefs.observe import log as logging


def report(ready_fd: int | None, outcome: dict[str, object]) -> None:
    """Tell the supervisor, once, how the start went."""
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, json.dumps(outcome).encode() + b"\n")
        os.close(ready_fd)
    except OSError:
        pass  # A supervisor that died meanwhile: we serve on.


def main(argv: list[str]) -> int:
    """Run the daemon to its end; returns the exit code."""
    # Asked to tell what it is doing (`selfreport`) before it can: that must not end it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    arguments = parse(argv)
    settings = arguments.settings
    logging.configure(settings.log.level, settings.log.format)
    from cachefs.daemon.joining import CannotJoin, rehearse
    from cachefs.daemon.serve import Server

    log = logging.get_logger("cachefs.daemon")
    # Collections of the oldest generation scan everything and take milliseconds; what is made at
    # the start lives to the end.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    if arguments.standby_fd is not None:
        promoted = await_turn(arguments)
        if promoted is None:
            return CLEAN
        arguments = promoted
    for fd in (arguments.fuse_fd, arguments.state_fd, arguments.ready_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    try:
        if arguments.rehearsal:
            rehearse(arguments)
            return CLEAN
        return Server(arguments, report).run()
    except CachefsError as error:
        hint = f"; {error.hint}" if error.hint else ""
        log.error("the daemon cannot go on", reason=f"{error}{hint}")
        hopeless = isinstance(error, CannotJoin)
        _report_failure(
            arguments.ready_fd, str(error), error.hint, error.exit_code, retry=not hopeless
        )
        return error.exit_code
    except Exception as error:
        log.exception("the daemon hit an error that nobody foresaw")
        message = f"the daemon failed: {type(error).__name__}: {error}"
        _report_failure(arguments.ready_fd, message, "its log has the details", FAILED)
        return FAILED


def _report_failure(
    ready_fd: int | None, message: str, hint: str, exit_code: int, *, retry: bool = True
) -> None:
    outcome = {"ok": False, "message": message, "hint": hint, "exit_code": exit_code}
    report(ready_fd, {**outcome, "retry": retry})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
