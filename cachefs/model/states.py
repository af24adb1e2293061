"""The life of a generation: one table says which event leads from which state to which.

``open -> sealed -> uploading -> durable`` is the way of every file; ``held`` (temporary name, or a
writer that outlived its mount), ``stalled`` (the store refuses), ``conflicted`` (someone else
changed the key) and ``superseded`` (a newer generation, or a delete, made it moot) lie beside it.
"""

from __future__ import annotations

from enum import StrEnum


class GenState(StrEnum):
    """Where a generation stands."""

    OPEN = "open"
    SEALED = "sealed"
    UPLOADING = "uploading"
    DURABLE = "durable"
    HELD = "held"
    STALLED = "stalled"
    CONFLICTED = "conflicted"
    SUPERSEDED = "superseded"


class Event(StrEnum):
    """What happens to a generation."""

    SEAL = "seal"
    """Its last writer closed."""
    HOLD = "hold"
    """It must not be uploaded for now."""
    RELEASE = "release"
    """The reason to hold it is gone."""
    START = "start"
    """Its upload begins, or begins again."""
    PAUSE = "pause"
    """Its upload stops without a verdict: shutdown, crash, rename."""
    COMMIT = "commit"
    """The store confirmed it, every byte."""
    REFUSE = "refuse"
    """The store says no, and will go on saying so."""
    CONFLICT = "conflict"
    """The key holds what someone else put there."""
    RESOLVE = "resolve"
    """A person decided that a stalled, conflicted or superseded one is to be uploaded."""
    SUPERSEDE = "supersede"
    """Nobody needs it in the store any more."""


class InvalidTransition(ValueError):
    """An event that cannot happen in that state."""

    def __init__(self, state: GenState, event: Event) -> None:
        super().__init__(state, event)
        self.state = state
        self.event = event

    def __str__(self) -> str:
        return f"a generation that is {self.state} cannot {self.event}"


_S, _E = GenState, Event

TRANSITIONS: dict[GenState, dict[Event, GenState]] = {
    _S.OPEN: {
        _E.SEAL: _S.SEALED,
        _E.HOLD: _S.HELD,
        _E.SUPERSEDE: _S.SUPERSEDED,
    },
    _S.SEALED: {
        _E.HOLD: _S.HELD,
        _E.START: _S.UPLOADING,
        _E.REFUSE: _S.STALLED,
        _E.CONFLICT: _S.CONFLICTED,
        _E.SUPERSEDE: _S.SUPERSEDED,
    },
    _S.UPLOADING: {
        _E.HOLD: _S.HELD,
        _E.PAUSE: _S.SEALED,
        _E.COMMIT: _S.DURABLE,
        _E.REFUSE: _S.STALLED,
        _E.CONFLICT: _S.CONFLICTED,
        _E.SUPERSEDE: _S.SUPERSEDED,
    },
    _S.DURABLE: {
        _E.SUPERSEDE: _S.SUPERSEDED,
    },
    _S.HELD: {
        _E.RELEASE: _S.SEALED,
        _E.SUPERSEDE: _S.SUPERSEDED,
    },
    _S.STALLED: {
        _E.HOLD: _S.HELD,
        _E.START: _S.UPLOADING,
        _E.CONFLICT: _S.CONFLICTED,
        _E.RESOLVE: _S.SEALED,
        _E.SUPERSEDE: _S.SUPERSEDED,
    },
    _S.CONFLICTED: {
        _E.RESOLVE: _S.SEALED,
        _E.SUPERSEDE: _S.SUPERSEDED,
    },
    _S.SUPERSEDED: {
        _E.RESOLVE: _S.SEALED,
    },
}

DIRTY = frozenset({_S.OPEN, _S.SEALED, _S.UPLOADING, _S.HELD, _S.STALLED, _S.CONFLICTED})
"""States in which the cache file may hold bytes that the store is to get: never evicted. (Neither
is a superseded one that a name shows, but nobody waits for it.)"""

DAMAGED = "its cache file is damaged"
"""How the reason of a held generation begins that only a person may release, since its bytes are
not those that were written."""

NEVER_ON_DISK = "the machine went down before any of it was on the disk, and it is lost"
"""The reason of one that has no cache file, of which nothing was promised."""

TROUBLED = frozenset({_S.HELD, _S.STALLED, _S.CONFLICTED})
"""States that a waiter cannot expect to end by themselves."""


def advance(state: GenState, event: Event) -> GenState:
    """Return the state after ``event``. InvalidTransition if it cannot happen in ``state``."""
    after = TRANSITIONS[state].get(event)
    if after is None:
        raise InvalidTransition(state, event)
    return after
