"""The toy's supervisor: mounts, starts the toy, starts it again when it dies.

    python toysup.py SOURCE MOUNTPOINT OPTIONS.json PIDFILE [DELAY]

Writes the toy's pid to PIDFILE. Ends (0) when the toy ends well, (1) when it gave up, and unmounts.
SIGTERM: unmount. DELAY: seconds before a restart.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

SOURCE, MOUNTPOINT, OPTIONS, PIDFILE = sys.argv[1:5]
DELAY = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
libc = ctypes.CDLL(None, use_errno=True)
HEADER = struct.Struct("=4sIIIQI")
"""magic, version, flags, epoch, takeovers, death: see the head of _tap.c."""
MAX_FAILURES = 5


def mount() -> int:
    fd = os.open("/dev/fuse", os.O_RDWR)
    data = f"fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other"
    if libc.mount(b"toy", MOUNTPOINT.encode(), b"fuse.toy", 6, data.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    return fd


def update(state: int, *, restart: bool, killed: bool) -> bool:
    """Count the start that comes; whether a takeover is possible."""
    magic, version, flags, epoch, takeovers, _ = HEADER.unpack(os.pread(state, HEADER.size, 0))
    packed = HEADER.pack(magic, version, flags, epoch + 1, takeovers + restart, killed)
    os.pwrite(state, packed, 0)
    return bool(flags & 1)


def start(fuse: int, state: int) -> subprocess.Popen[bytes]:
    toy = Path(__file__).with_name("toyfs.py")
    command = [sys.executable, str(toy), SOURCE, str(fuse), str(state), OPTIONS]
    daemon = subprocess.Popen(command, pass_fds=(fuse, state))
    Path(PIDFILE).write_text(str(daemon.pid))
    return daemon


def main() -> int:
    fuse = mount()
    state = os.memfd_create("toy")
    os.ftruncate(state, 4 << 20)
    signal.signal(signal.SIGTERM, lambda *_: libc.umount2(MOUNTPOINT.encode(), 2))
    restart = killed = False
    failures = 0
    while True:
        possible = update(state, restart=restart, killed=killed)
        if restart and not possible:
            break
        code = start(fuse, state).wait()
        print(f"toy ended: {code}", flush=True)
        restart, killed = True, code == -signal.SIGKILL
        failures = 0 if killed else failures + 1
        if code >= 0 or failures > MAX_FAILURES:
            break
        time.sleep(DELAY)
    libc.umount2(MOUNTPOINT.encode(), 2)
    return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
