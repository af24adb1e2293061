"""What a tier keeps: which checkpoints it may give up, and why.

A tier gives a checkpoint up whole or not at all, and only when the next tier has all of it. What is
not a checkpoint is no affair of retention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """What to keep; None: no such rule. With several rules a checkpoint goes if any says so.

    `newest`: that many checkpoints; `every`: those whose step is a multiple are kept for ever, and
    count for no other rule; `nbytes`: as many of the newest as fit; `age_ns`: those younger. What
    stays for another reason (a pointer names it) counts for them.
    """

    newest: int | None = None
    every: int | None = None
    nbytes: int | None = None
    age_ns: int | None = None

    @property
    def any(self) -> bool:
        """Whether anything is ever given up."""
        return not (self.newest is self.nbytes is self.age_ns is None)


@dataclass(frozen=True, slots=True)
class Kept:
    """One checkpoint in a tier. `safe`: it is complete, and the next tier has all of it; `stays`:
    why it is kept whatever the rules say, for people; empty: for no such reason."""

    root: str
    step: int | None
    nbytes: int
    changed_ns: int
    safe: bool
    stays: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one checkpoint; `reason` is for people. `goes` is false for one that a rule
    names while it is not safe to let it go."""

    checkpoint: Kept
    goes: bool
    reason: str


def judge(rules: Rules, checkpoints: Iterable[Kept], now_ns: int) -> list[Verdict]:
    """A verdict on every checkpoint, newest first.

    The newest one that is safe is never given up, whatever the rules say, nor any that is newer.
    """
    newest_first = sorted(checkpoints, key=lambda each: (each.changed_ns, each.root), reverse=True)
    found = []
    seen = nbytes = 0
    safe_seen = False
    for each in newest_first:
        if rules.every and each.step is not None and each.step % rules.every == 0:
            found.append(Verdict(each, False, f"kept for ever: step {each.step}"))
            continue
        seen += 1
        nbytes += each.nbytes
        reason = _why(rules, each, seen, nbytes, now_ns)
        if reason and each.stays:
            found.append(Verdict(each, False, each.stays))
        elif reason and not each.safe:
            found.append(Verdict(each, False, f"{reason}, but the next tier lacks part of it"))
        elif reason and not safe_seen:
            found.append(Verdict(each, False, "the newest that is safe"))
        else:
            found.append(Verdict(each, bool(reason), reason))
        safe_seen = safe_seen or each.safe
    return found


def _why(rules: Rules, each: Kept, seen: int, nbytes: int, now_ns: int) -> str:
    """Which rule gives a checkpoint up; `seen` and `nbytes` count it and all newer ones."""
    if rules.newest is not None and seen > rules.newest:
        return f"{seen - 1} newer ones, {rules.newest} are kept"
    if rules.nbytes is not None and nbytes > rules.nbytes:
        return f"{nbytes} bytes with the newer ones, {rules.nbytes} are kept"
    if rules.age_ns is not None and now_ns - each.changed_ns > rules.age_ns:
        return f"{(now_ns - each.changed_ns) / 1e9:.0f} s old, {rules.age_ns / 1e9:.0f} s are kept"
    return ""
