"""Pending effects by key, as a tree of path components.

Answers "who else is at this key, above it, or below it" in the depth of the key. Keys are compared
as paths: a directory's marker ``a/`` and an object ``a`` share a place.
"""

from __future__ import annotations

from collections.abc import Iterator

from cachefs.model.effects import EffectKind, Pending


def paths_of(effect: Pending) -> tuple[str, ...]:
    """Return the places of an effect: its key, and for a relocation also its source."""
    key = effect.key.strip("/")
    if effect.old_key is None:
        return (key,)
    return (key, effect.old_key.strip("/"))


def is_marker(effect: Pending) -> bool:
    """Return whether the effect concerns a directory's own marker object, not what is below it."""
    if effect.kind is EffectKind.RELOCATE:
        return False
    return effect.is_dir or effect.key.endswith("/")


class _Node:
    __slots__ = ("children", "effects", "loose", "name", "parent", "total")

    def __init__(self, parent: _Node | None, name: str) -> None:
        self.parent = parent
        self.name = name
        self.children: dict[str, _Node] = {}
        self.effects: list[Pending] = []
        self.total = 0  # effects here and below
        self.loose = 0  # those of them that are unordered


class KeyTree:
    """The pending effects that keep their place on their keys."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root = _Node(None, "")

    def add(self, effect: Pending) -> None:
        """Enter ``effect`` at each of its places."""
        for path in paths_of(effect):
            self._make(path, effect.unordered).effects.append(effect)

    def discard(self, effect: Pending) -> None:
        """Take ``effect`` out; it must be the value that was added."""
        for path in paths_of(effect):
            node = self._find(path)
            if node is None:
                raise KeyError(path)
            node.effects.remove(effect)
            self._uncount(node, effect.unordered)
            self._prune(node)

    def at_or_above(self, path: str) -> Iterator[tuple[bool, Pending]]:
        """Yield (is at the path itself, effect) for the path and every ancestor of it."""
        node: _Node | None = self._root
        parts = path.split("/")
        last = len(parts) - 1
        for depth, part in enumerate(parts):
            node = node.children.get(part) if node is not None else None
            if node is None:
                return
            for effect in node.effects:
                yield depth == last, effect

    def below(self, path: str, *, loose_only: bool = False) -> Iterator[Pending]:
        """Yield the effects strictly below ``path``; only unordered ones if asked."""
        top = self._find(path)
        stack = list(top.children.values()) if top is not None else []
        while stack:
            node = stack.pop()
            if loose_only and not node.loose:
                continue
            yield from (e for e in node.effects if e.unordered or not loose_only)
            stack.extend(node.children.values())

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for part in path.split("/"):
            if node is None:
                return None
            node = node.children.get(part)
        return node

    def _make(self, path: str, loose: bool) -> _Node:
        """The place of one more effect, which is counted there and above."""
        node = self._root
        node.total += 1
        node.loose += loose
        for part in path.split("/"):
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Node(node, part)
            node = child
            node.total += 1
            node.loose += loose
        return node

    @staticmethod
    def _uncount(node: _Node, loose: bool) -> None:
        at: _Node | None = node
        while at is not None:
            at.total -= 1
            at.loose -= loose
            at = at.parent

    @staticmethod
    def _prune(node: _Node) -> None:
        while node.parent is not None and not node.total:
            del node.parent.children[node.name]
            node = node.parent
