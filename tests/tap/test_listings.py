"""Which listings the kernel may give out again (no mount)."""

from __future__ import annotations

from typing import Any

import pytest

from cachefs.fuse.listings import Listings

DIRECTORY, OTHER = 7, 8


class Desk:
    """Opens directories at a time of its own; tells what was granted: None, fresh or kept."""

    def __init__(self, lifetime: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.fh = 1000.0, 0
        self.handles: dict[int, int] = {}
        self.granted: dict[int, bool] = {}
        self.listings = Listings(self.granted.__setitem__, self.handles, lifetime=lifetime)
        monkeypatch.setattr("cachefs.fuse.listings.time.monotonic", lambda: self.now)

    def open(self, ino: int = DIRECTORY, *, is_old: bool = False, close: bool = True) -> str | None:
        self.fh += 1
        self.handles[self.fh] = ino
        self.listings.opened(self.fh, ino, is_old=is_old)
        if close:
            del self.handles[self.fh]
        kept: Any = self.granted.get(self.fh)
        return None if kept is None else "kept" if kept else "fresh"


def test_entries_are_kept_for_their_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from when they were read, not from when they were last given out."""
    desk = Desk(60, monkeypatch)
    assert desk.open() == "fresh"
    for _ in range(3):
        desk.now += 19
        assert desk.open() == "kept"
    assert desk.open(OTHER) == "fresh"
    desk.now += 19
    assert desk.open() == "fresh"
    assert desk.open() == "kept"


def test_what_others_change_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refreshed listing, and one that is due to be."""
    desk = Desk(60, monkeypatch)
    desk.open()
    desk.listings.forget(DIRECTORY)
    assert [desk.open(), desk.open()] == ["fresh", "kept"]
    assert desk.open(is_old=True) == "fresh"


def test_one_handle_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a directory that is open gets no entries from the kernel."""
    desk = Desk(60, monkeypatch)
    assert desk.open(close=False) == "fresh"
    assert desk.open() is None
    assert desk.open(OTHER) == "fresh"
    desk.handles.clear()
    assert desk.open() == "kept"


def test_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """With metadata_ttl 0 nothing is remembered."""
    assert Desk(0, monkeypatch).open() is None
