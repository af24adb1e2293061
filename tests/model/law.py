"""The order law, naively: pairs compared one by one, nothing remembered."""

from __future__ import annotations

from dataclasses import dataclass, field

from cachefs.model.order import EffectClass, EffectKind, Pending

RANK = {EffectClass.DATA: 0, EffectClass.SMALL: 1, EffectClass.BARRIER: 2}


def klass(e: Pending) -> EffectClass:
    return EffectClass.BARRIER if e.kind is EffectKind.UNPUBLISH else e.klass


def place(e: Pending) -> tuple[int, int, int]:
    return (e.end, RANK[klass(e)], e.id)


def parts(key: str) -> list[str]:
    return key.strip("/").split("/")


def above(one: list[str], two: list[str]) -> bool:
    return len(one) < len(two) and two[: len(one)] == one


def concerns_only_the_directory_itself(e: Pending) -> bool:
    return e.kind is not EffectKind.RELOCATE and (e.is_dir or e.key.endswith("/"))


def related(e: Pending, f: Pending) -> bool:
    """Whether e, which comes later, must wait for f because of their keys."""
    if e.kind is f.kind is EffectKind.UNPUBLISH:
        return False
    for mine in filter(None, (e.key, e.old_key)):
        for theirs in filter(None, (f.key, f.old_key)):
            if parts(mine) == parts(theirs):
                return True
            if above(parts(theirs), parts(mine)) and not concerns_only_the_directory_itself(f):
                return True
            publishes_marker = e.kind is EffectKind.PUBLISH and concerns_only_the_directory_itself(
                e
            )
            if above(parts(mine), parts(theirs)) and not publishes_marker:
                return True
    return False


@dataclass
class Law:
    pending: dict[int, Pending] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    def by_structure(self, e: Pending, f: Pending) -> bool:
        return place(f) < place(e) and related(e, f)

    def waits_for_nothing(self, e: Pending) -> bool:
        live = (f for f in self.pending.values() if not f.held)
        return klass(e) is EffectClass.DATA and not any(self.by_structure(e, f) for f in live)

    def by_class(self, e: Pending, f: Pending) -> bool:
        if e.unordered or f.unordered or e.id == f.id:
            return False
        if e.kind is f.kind is EffectKind.UNPUBLISH:
            return False
        begins = place(f)
        if self.waits_for_nothing(f):
            begins = (f.since, 0, f.id)
        if begins > place(e):
            return False
        if klass(e) is EffectClass.SMALL:
            return klass(f) is EffectClass.DATA
        return klass(e) is EffectClass.BARRIER

    def waits(self, e: Pending, f: Pending) -> bool:
        if e.held or f.held:
            return False
        return self.by_structure(e, f) or self.by_class(e, f)

    def blockers(self, number: int) -> set[int]:
        e = self.pending[number]
        return {f.id for f in self.pending.values() if self.waits(e, f)}

    def committable(self, blockers: dict[int, set[int]]) -> list[int]:
        free = [
            e
            for e in self.pending.values()
            if not (e.held or e.blocked or e.id in self.begun or blockers[e.id])
        ]
        return [e.id for e in sorted(free, key=place)]

    def culprits(self, number: int, blockers: dict[int, set[int]]) -> set[int]:
        found: set[int] = set()
        todo = [number]
        while todo:
            fresh = blockers[todo.pop()] - found
            found |= fresh
            todo.extend(fresh)
        return {n for n in found if self.pending[n].blocked}

    def may_supersede(self, old_id: int, new: Pending, keep_below: int = 1 << 20) -> bool:
        """What the rule promises, found by trying: nobody loses a wait, and no circle arises."""
        old = self.pending[old_id]
        if EffectKind.RELOCATE in (old.kind, new.kind) or parts(old.key) != parts(new.key):
            return False
        if concerns_only_the_directory_itself(old) != concerns_only_the_directory_itself(new):
            return False
        if old.held:
            return True
        if old_id in self.begun or place(new) <= place(old):
            return False
        first = not any(
            f.kind is EffectKind.PUBLISH
            and not f.held
            and parts(f.key) == parts(old.key)
            and place(f) < place(old)
            for f in self.pending.values()
        )
        small = old.size < keep_below and not old.unordered and not old.blocked
        if old.kind is EffectKind.PUBLISH and klass(old) is EffectClass.BARRIER and small and first:
            return False
        rest = Law({n: e for n, e in self.pending.items() if n != old_id})
        begins = min(old.since, old.end) if klass(old) is EffectClass.DATA else old.end
        eager = Pending(  # whoever may come to wait for old, now or when it waits for nothing
            **{f: getattr(old, f) for f in Pending.__slots__} | {"since": begins}
        )
        waiters = [
            e
            for e in rest.pending.values()
            if not e.held and place(e) < place(new) and self._would_wait(e, eager)
        ]
        if any(related(e, old) and place(e) > place(old) for e in waiters):
            return False
        if not waiters:
            return True
        rest.pending[new.id] = new
        return (
            klass(new) is EffectClass.DATA
            and not new.held
            and not new.unordered
            and rest.waits_for_nothing(new)
        )

    @staticmethod
    def _would_wait(e: Pending, f: Pending) -> bool:
        if place(f) < place(e) and related(e, f):
            return True
        if e.unordered or f.unordered or e.kind is f.kind is EffectKind.UNPUBLISH:
            return False
        begins = (f.since, 0, f.id) if klass(f) is EffectClass.DATA else place(f)
        if begins > place(e) or klass(e) is EffectClass.DATA:
            return False
        return klass(e) is EffectClass.BARRIER or klass(f) is EffectClass.DATA
