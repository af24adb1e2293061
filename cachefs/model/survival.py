"""Survival levels: what it would take to lose a byte."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Level(IntEnum):
    """What a byte survives, from nothing to the loss of everything here."""

    NONE = 0
    """Only in a process's memory."""
    PROCESS = 1
    """The death of any process: it is in a RAM disk."""
    REBOOT = 2
    """A reboot or power cut: it is on a local disk."""
    INSTANCE = 3
    """The loss of this machine: it is on a network or parallel filesystem."""
    SITE = 4
    """The loss of the site: it is in the object store."""

    @classmethod
    def parse(cls, text: str) -> Level:
        """Return the level of that name. ValueError, naming all levels, if there is none."""
        try:
            return cls[text.strip().upper()]
        except KeyError:
            known = ", ".join(str(level) for level in cls)
            raise ValueError(f"unknown survival level {text!r}: one of {known}") from None

    def __str__(self) -> str:
        return self.name.lower()


def of_placements(levels: Iterable[Level]) -> Level:
    """Return what a file survives: the best of its copies, nothing if there is none."""
    return max(levels, default=Level.NONE)


def of_files(levels: Iterable[Level]) -> Level:
    """Return what a checkpoint survives: the worst of its files; an empty one survives all."""
    return min(levels, default=Level.SITE)
