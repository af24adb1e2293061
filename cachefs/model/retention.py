"""What a tier keeps: which checkpoints it may give up, and why.

A tier gives a checkpoint up whole or not at all, and only when the next tier has all of it. What is
not a checkpoint is no affair of retention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    why it is kept whatever the rules say, for people; empty: for no such reason; `below`: the next
    tier has all that there is of it, complete here or not; `firm`: what keeps it does so even where
    there is no room; `remains`: part of it was given up before, and the next tier has all of it."""

    root: str
    step: int | None
    nbytes: int
    changed_ns: int
    safe: bool
    stays: str = ""
    below: bool = False
    firm: bool = True
    remains: bool = False


@dataclass(frozen=True, slots=True)
class Coming:
    """A checkpoint (or another file) that finds no room in a tier. `nbytes`: as many have to go;
    `whole`: its saver has finished it; `below`: the next tier has all of it."""

    root: str
    nbytes: int
    changed_ns: int
    whole: bool = False
    below: bool = False


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
        if _for_ever(rules, each):
            found.append(Verdict(each, False, f"kept for ever: step {each.step}"))
            continue
        seen += 1
        nbytes += each.nbytes
        reason = _why(rules, each, seen, nbytes, now_ns)
        if reason and each.stays:
            found.append(Verdict(each, False, each.stays))
        elif reason and each.remains and not each.safe:
            found.append(Verdict(each, True, reason))
        elif reason and not each.safe:
            found.append(Verdict(each, False, f"{reason}, but the next tier lacks part of it"))
        elif reason and not safe_seen:
            found.append(Verdict(each, False, "the newest that is safe"))
        else:
            found.append(Verdict(each, bool(reason), reason))
        safe_seen = safe_seen or each.safe
    return found


def make_room(rules: Rules, verdicts: Sequence[Verdict], coming: Coming) -> list[Verdict]:
    """The verdicts where something newer finds no room: older ones give way to it, the oldest
    first, but only as many as it needs, and none if that is not enough.

    The newest one that is safe, or one that a pointer names which is about to change, gives way
    only to one that is whole. What finds no room beside newer ones is given up itself.
    """
    lacking = coming.nbytes - sum(each.checkpoint.nbytes for each in verdicts if each.goes)
    safe = [each.checkpoint for each in verdicts if each.checkpoint.safe and not each.goes]
    going = set()
    for kept in [each.checkpoint for each in reversed(verdicts) if not each.goes]:
        is_dear = kept.stays or kept in safe[:1]
        may_go = _yields(kept, coming) and not _for_ever(rules, kept)
        if lacking > 0 and may_go and (coming.whole or not is_dear):
            going.add(kept.root)
            lacking -= kept.nbytes
    if lacking <= 0:
        reason = f"there is no room for {coming.root}"
        return [
            _let_go(each, reason) if each.checkpoint.root in going else each for each in verdicts
        ]
    if coming.below and any(each.changed_ns > coming.changed_ns for each in safe):
        reason = "there is no room beside newer ones"
        known = [each for each in verdicts if each.checkpoint.root == coming.root]
        others = [each for each in verdicts if each not in known]
        itself = Kept(coming.root, None, 0, coming.changed_ns, safe=False, below=True)
        return [*others, Verdict(known[0].checkpoint if known else itself, True, reason)]
    return list(verdicts)


def _yields(kept: Kept, coming: Coming) -> bool:
    older = kept.changed_ns < coming.changed_ns and kept.root != coming.root
    return older and kept.below and not (kept.stays and kept.firm)


def _let_go(verdict: Verdict, reason: str) -> Verdict:
    return verdict if verdict.goes else Verdict(verdict.checkpoint, True, reason)


def _for_ever(rules: Rules, each: Kept) -> bool:
    every, step = rules.every, each.step
    return bool(every and step is not None and step % every == 0)


def _why(rules: Rules, each: Kept, seen: int, nbytes: int, now_ns: int) -> str:
    """Which rule gives a checkpoint up; `seen` and `nbytes` count it and all newer ones."""
    if rules.newest is not None and seen > rules.newest:
        return f"{seen - 1} newer ones, {rules.newest} are kept"
    if rules.nbytes is not None and nbytes > rules.nbytes:
        return f"{nbytes} bytes with the newer ones, {rules.nbytes} are kept"
    if rules.age_ns is not None and now_ns - each.changed_ns > rules.age_ns:
        return f"{(now_ns - each.changed_ns) / 1e9:.0f} s old, {rules.age_ns / 1e9:.0f} s are kept"
    return ""
