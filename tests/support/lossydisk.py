"""A disk that loses what it was given to write, and works again afterwards."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.support.mounts import poll


class LossyDisk:
    """An ext4 whose image is on a filesystem that can be filled: then the kernel's write-back of
    what is new fails, and after that everything works again."""

    def __init__(self, folder: Path, name: str = "disk", mib: int = 20) -> None:
        """Mounted on `folder/name`; to be ended by `end`."""
        self.below, self.top = folder / "below", folder / name
        self.image, self._others = self.below / "disk.img", self.below / "others"
        self.below.mkdir()
        self.top.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib + 4}M", "none", self.below], check=True
        )
        with open(self.image, "wb") as image:
            image.truncate(mib << 20)
        words = ["mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0"]
        subprocess.run([*words, "-b", "4096", self.image], check=True)
        self._mount()

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self.image, self.top], check=True)
        source = subprocess.check_output(["findmnt", "-no", "SOURCE", self.top], text=True)
        # A loop device takes a write for done of which the first pages were.
        limit = Path("/sys/block") / Path(source.strip()).name / "queue/max_sectors_kb"
        limit.write_text("4")

    def fail(self) -> None:
        """From now on what is new cannot be written."""
        os.sync()
        with open(self._others, "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass

    def work(self) -> None:
        """From now on it can."""
        self._others.unlink()

    def lose_power(self) -> None:
        """What is not on the disk is gone. (Nobody has anything open there.)"""
        subprocess.run(["umount", self.top], check=True)
        self._mount()

    def end(self) -> None:
        """Unmount it, once threads that are not waited for have closed what they had open."""
        for place in (self.top, self.below):
            poll(lambda place=place: not _umount(place), 20, what="no longer busy")


def _umount(place: Path) -> int:
    return subprocess.run(["umount", place], check=False).returncode
