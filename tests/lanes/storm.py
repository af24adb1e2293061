"""A client program: make small files as fast as it goes, and note each once its close returned.

Run as a program (standard library only): `storm.py FOLDER LOG SECONDS`. It ends after these seconds
or once LOG.stop exists; the last line is `end`.
"""

from __future__ import annotations

import os
import random
import sys
import time


def main() -> None:
    """Until the time is over."""
    folder, log, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    until = time.monotonic() + seconds
    stop = os.path.splitext(log)[0] + ".stop"
    with open(log, "w", buffering=1, encoding="ascii") as told:
        number = 0
        while time.monotonic() < until and not os.path.exists(stop):
            name = f"f{number:05}"
            fd = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
            data = random.Random(name).randbytes(1 + len(name) * 397)
            assert os.write(fd, data) == len(data)
            os.close(fd)
            told.write(f"{name}\n")
            number += 1
        told.write("end\n")


if __name__ == "__main__":
    main()
