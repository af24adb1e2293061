"""The law over random lives of a small tree: what callers of EffectOrder do, what a reader sees.

A tree is written, rewritten, renamed and deleted while effects commit in any order that the line
offers.
Each effect remembers, independently of the line, what had to be visible before it when it ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest

from cachefs.model import names
from cachefs.model.order import (
    EffectClass,
    EffectKind,
    EffectOrder,
    OrderRules,
    Pending,
    classify,
    is_unordered,
)

K, C = EffectKind, EffectClass
PATHS = [
    "s1/a.bin",
    "s1/b.bin",
    "s1/c.json",
    "s1/x.index.json",
    "s2/a.bin",
    "s2/x.index.json",
    "s2",
    "s1/a.bin/deep.bin",
    "t.tmp",
    "t.tmp/a.bin",
    "t.tmp/x.index.json",
    "logs/l",
    "latest",
]
DIRECTORIES = ["s1", "s2", "t.tmp", "s3"]


@dataclass
class Tree:
    """The local tree, the bucket, and the line between them."""

    rules: OrderRules
    order: EffectOrder = field(default_factory=EffectOrder)
    local: dict[str, int] = field(default_factory=dict)  # path -> version
    bucket: dict[str, int] = field(default_factory=dict)
    version_of: dict[int, int] = field(default_factory=dict)  # effect -> version
    owed: dict[int, set[int]] = field(default_factory=dict)  # effect -> what must go before it
    number: int = 0

    # -- what happens locally ----------------------------------------------------------------------

    def write(self, path: str) -> None:
        if any(p.startswith(path + "/") or path.startswith(p + "/") for p in self.local):
            return  # EISDIR, ENOTDIR
        self.local[path] = number = self._tick()
        effect = self._publish(path, number)
        self.version_of[effect.id] = number
        self._line_up(effect)

    def delete(self, path: str) -> None:
        if self.local.pop(path, None) is not None:
            self._cancel(path)
            self._unpublish(path)

    def rename(self, source: str, target: str) -> None:
        moved = {p: target + p[len(source) :] for p in self.local if self._within(p, source)}
        if not moved or self._within(target, source) or not self._target_fits(moved, target):
            return
        is_dir = source not in moved
        for path in list(self.local):
            if self._within(path, target):  # replaced
                del self.local[path]
                self._cancel(path)
        if any(self._within(k, source) for k in self._will_be_in_bucket()):
            self._relocate(source, target, is_dir)
        end = self._tick()
        for old, new in moved.items():
            self.local[new] = self.local.pop(old)
        for effect in [e for e in self.order if e.kind is K.PUBLISH and e.key in moved]:
            self._move(effect, moved[effect.key], end)

    # -- what becomes visible ----------------------------------------------------------------------

    def commit(self, number: int) -> None:
        owing = self.owed.pop(number)
        assert not owing & {e.id for e in self.order}, "visible before what it waits for"
        effect = self.order.remove(number)
        if effect.kind is K.PUBLISH:
            self.bucket[effect.key] = self.version_of[number]
        elif effect.kind is K.UNPUBLISH:
            self.bucket.pop(effect.key, None)
        else:
            assert effect.old_key is not None
            for key in [k for k in self.bucket if self._within(k, effect.old_key)]:
                self.bucket[effect.key + key[len(effect.old_key) :]] = self.bucket.pop(key)
        for key in self.bucket:
            assert not any(k.startswith(key + "/") for k in self.bucket), "file and directory"

    def drain(self) -> None:
        for effect in [e for e in self.order if e.held]:
            self._enter(replace(effect, held=False))
        while ready := self.order.committable():
            self.commit(ready[-1])
        assert not len(self.order)
        assert self.bucket == self.local

    # -- how effects come about --------------------------------------------------------------------

    def _tick(self) -> int:
        self.number += 1
        return self.number

    @staticmethod
    def _within(path: str, top: str) -> bool:
        return path == top or path.startswith(top + "/")

    def _target_fits(self, moved: dict[str, str], target: str) -> bool:
        if "/" in target and target.rpartition("/")[0] in self.local:
            return False
        to_dir = any(p.startswith(target + "/") for p in self.local)
        return not to_dir and not (target in self.local and target not in moved.values())

    def _will_be_in_bucket(self) -> set[str]:
        """Keys that are in the bucket once all but publishes are done."""
        keys = set(self.bucket)
        for effect in sorted(self.order, key=lambda e: (e.end, e.id)):
            if effect.kind is K.UNPUBLISH:
                keys.discard(effect.key)
            elif effect.kind is K.RELOCATE:
                assert effect.old_key is not None
                for key in [k for k in keys if self._within(k, effect.old_key)]:
                    keys.remove(key)
                    keys.add(effect.key + key[len(effect.old_key) :])
            elif effect.id in {e.id for e in self.order if not self._is_last(e)}:
                keys.add(effect.key)
        return keys

    def _is_last(self, effect: Pending) -> bool:
        """Whether no later publish of the same key is in line: a delete would cancel it."""
        same = [e for e in self.order if e.kind is K.PUBLISH and e.key == effect.key]
        return effect.kind is not K.PUBLISH or max(e.end for e in same) == effect.end

    def _publish(self, path: str, end: int, number: int | None = None) -> Pending:
        known = path in self.bucket or path in self._will_be_in_bucket()
        klass = classify(
            self.rules,
            kind=K.PUBLISH,
            name=path.rpartition("/")[2],
            path=path,
            size=100,
            new_key=not known,
        )
        return Pending(
            id=self._tick() if number is None else number,
            kind=K.PUBLISH,
            klass=klass,
            since=end,
            end=end,
            key=path,
            unordered=is_unordered(self.rules, path),
            held=names.is_temp(self.rules.temp_patterns, path),
            size=100,
        )

    def _line_up(self, effect: Pending) -> None:
        """Put a publish in line, in place of those that it may supersede."""
        for old in [e for e in self.order if e.key == effect.key and e.id != effect.id]:
            if old.kind is K.PUBLISH and self.order.may_supersede(old.id, effect):
                effect = self.order.supersede(old.id, effect)
                self.owed.pop(old.id)
                for owing in self.owed.values():
                    if old.id in owing:
                        owing.remove(old.id)
                        owing.add(effect.id)
        self._enter(effect)

    def _enter(self, effect: Pending) -> None:
        if effect.id in self.order:
            self.order.update(effect)
        else:
            self.order.add(effect)
        self.owed[effect.id] = {e.id for e in self.order if self._owes(effect, e)}

    @staticmethod
    def _owes(effect: Pending, other: Pending) -> bool:
        out = effect.held or other.held or effect.unordered or other.unordered
        if out or other.end > effect.end or other.id == effect.id:
            return False
        if effect.klass is C.BARRIER:
            both_unpublish = effect.kind is other.kind is K.UNPUBLISH
            return other.end < effect.end and not both_unpublish
        return effect.klass is C.SMALL and other.klass is C.DATA and other.end < effect.end

    def _cancel(self, path: str) -> None:
        for effect in [e for e in self.order if e.kind is K.PUBLISH and e.key == path]:
            self.order.remove(effect.id)
            self.owed.pop(effect.id)

    def _unpublish(self, path: str) -> None:
        if path in self._will_be_in_bucket():
            end = self._tick()
            self._enter(Pending(self._tick(), K.UNPUBLISH, C.BARRIER, end, end, path))

    def _relocate(self, source: str, target: str, is_dir: bool) -> None:
        end = self._tick()
        self._enter(
            Pending(
                self._tick(), K.RELOCATE, C.BARRIER, end, end, target, old_key=source, is_dir=is_dir
            )
        )

    def _move(self, effect: Pending, key: str, end: int) -> None:
        self.order.remove(effect.id)  # so that it does not count as one that will be published
        moved = self._publish(key, end, effect.id)
        waited_for = [n for n, owing in self.owed.items() if effect.id in owing]
        since = end if effect.held else effect.since
        self._line_up(replace(moved, since=min(since, end)))
        now = self.order.get(effect.id)
        still_handed_over = now.klass is C.DATA and not (now.held or now.unordered)
        if not still_handed_over or self.order.blockers(now.id):
            for number in waited_for:  # its old name is gone: nothing to wait for
                self.owed.get(number, set()).discard(effect.id)


def live(random: Random, tree: Tree) -> None:
    what = random.random()
    if what < 0.45:
        tree.write(random.choice(PATHS))
    elif what < 0.55:
        tree.delete(random.choice(PATHS))
    elif what < 0.65:
        tree.rename(*random.sample(DIRECTORIES, 2))
    elif what < 0.75:
        tree.rename(*random.sample(PATHS, 2))
    elif ready := tree.order.committable():
        tree.commit(random.choice(ready))


@pytest.mark.parametrize("mode", ["safe", "strict"])
@pytest.mark.parametrize("seed", range(250))
def test_no_reader_sees_a_torn_tree(seed: int, mode: str) -> None:
    random = Random(seed)
    tree = Tree(OrderRules(mode=mode))
    for _ in range(random.randint(5, 60)):
        live(random, tree)
    tree.drain()
