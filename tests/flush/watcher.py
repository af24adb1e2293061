"""Looks at every state of the store and says whether a reader could have been misled.

For each marker (a file whose name says that others may be read) it knows what was complete when the
marker got its name: whoever sees the marker must find all of that beside it, in that version or a
later one. Files that were moved, removed or replaced on their own since then are no longer the
marker's affair, except that a file renamed over another takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cachefs.model.names import (
    BARRIER_PATTERNS,
    TEMP_PATTERNS,
    UNORDERED_PATTERNS,
    is_temp,
    matches,
)
from tests.flush.memory import MemoryStore
from tests.flush.tree import Node, Tree, tag_of
from tests.flush.world import PREFIX


@dataclass(eq=False)
class Pair:
    """One file that a marker stands for."""

    marker: str
    """Where the marker is now, in the tree."""
    path: str
    """Where the file is now, in the tree."""
    rel: str
    """Where it is from the marker's directory."""
    uid: int
    version: int
    others: set[int] = field(default_factory=set)
    """Files that were renamed over it."""
    void: bool = False


class Watcher:
    """Told by the actor what happens to names, and by the store of each change."""

    def __init__(self, tree: Tree, store: MemoryStore) -> None:
        self._tree = tree
        self._store = store
        self._contents: set[bytes] = set()
        self._pairs: dict[tuple[int, int, str], list[Pair]] = {}
        self.looks = 0
        self._count = 0
        self._complete: dict[str, int] = {}
        """When each path got its content or its name: a count."""
        self._unborn: set[str] = set()
        """Names that were given to files while these were open: shown only when they are closed."""
        self.violations: list[str] = []
        self.on_violation: Callable[[str], None] = lambda what: None
        store.on_change.append(self.look)

    # -- what the actor tells -----------------------------------------------------------------

    def sealed(self, node: Node) -> None:
        """The last writer closed a file."""
        node.sealed = node.version
        self._contents.add(node.data)
        self._count += 1
        for path, other in list(self._tree.walk("file")):
            if other is node:
                self._complete[path] = self._count
                self._unborn.discard(path)
                self._stand_for(path, node)

    def linked(self, path: str, node: Node) -> None:
        """A further name, of content that is complete or will be."""
        self._count += 1
        self._complete[path] = self._count
        if node.writers:
            self._unborn.add(path)
        self._stand_for(path, node)

    def removed(self, path: str) -> None:
        for pair in self._all():
            if path in (pair.path, pair.marker):
                pair.void = True

    def renamed(self, old: str, new: str, node: Node) -> None:
        """Already done in the tree."""
        if node.kind == "dir":
            self._directory_renamed(old, new)
            return
        self._count += 1
        self._complete[new] = self._count
        self._move_unborn(old, new)
        for pair in self._all():
            if old in (pair.path, pair.marker) or new == pair.marker:
                pair.void = True
            elif pair.path == new and node.kind == "file":
                pair.others.add(node.uid)
            elif pair.path == new:
                pair.void = True
        self._stand_for(new, node)

    def _move_unborn(self, old: str, new: str) -> None:
        self._unborn.discard(new)
        for path in [each for each in self._unborn if each == old or each.startswith(old + "/")]:
            self._unborn.remove(path)
            self._unborn.add(new + path[len(old) :])

    def _directory_renamed(self, old: str, new: str) -> None:
        self._move_unborn(old, new)
        for pair in self._all():
            inside = [each.startswith(old + "/") for each in (pair.path, pair.marker)]
            if all(inside):
                pair.path = new + pair.path[len(old) :]
                pair.marker = new + pair.marker[len(old) :]
            elif any(inside):
                pair.void = True
        moved = [each for each in self._complete if each.startswith(old + "/")]
        for path in sorted(moved, key=lambda each: self._complete[each]):
            self._count += 1  # They are complete under these names only now, in the old order.
            self._complete[new + path[len(old) :]] = self._count
            del self._complete[path]
        for path, node in list(self._tree.walk("file")):
            if path.startswith(new + "/"):
                self._stand_for(path, node, new)

    def exchanged(self, one: str, other: str) -> None:
        self._count += 1
        self._complete[one] = self._complete[other] = self._count
        for path in (one, other):
            node = self._tree.get(path)
            if node is not None and node.writers:
                self._unborn.add(path)
        for pair in self._all():
            for path in (one, other):
                for mine in (pair.path, pair.marker):
                    if mine == path or mine.startswith(path + "/"):
                        pair.void = True

    def _all(self) -> list[Pair]:
        return [pair for pairs in self._pairs.values() for pair in pairs if not pair.void]

    def _stand_for(self, path: str, marker: Node, moved: str = "") -> None:
        """The marker is complete under this name: so is all that is complete now.

        `moved`: the directory that was renamed with it; markers in it keep their order.
        """
        if not marker.sealed or is_temp(TEMP_PATTERNS, path):
            return
        if not matches(BARRIER_PATTERNS, path) or matches(UNORDERED_PATTERNS, path):
            return
        above = path.rpartition("/")[0]
        pairs = []
        for each, node in self._tree.walk("file"):
            if above and not each.startswith(above + "/"):
                continue
            quiet = is_temp(TEMP_PATTERNS, each) or matches(UNORDERED_PATTERNS, each)
            beside = bool(moved) and each.startswith(moved + "/")
            if beside and matches(BARRIER_PATTERNS, each) and self._is_later(each, path):
                continue
            if node is not marker and node.sealed and not quiet and each not in self._unborn:
                rel = each[len(above) + 1 :] if above else each
                pairs.append(Pair(path, each, rel, node.uid, node.sealed))
        # It may be shown there still since it last had that name.
        self._pairs.setdefault((marker.uid, marker.sealed, path), pairs)

    def _is_later(self, one: str, other: str) -> bool:
        return self._complete.get(one, 0) > self._complete.get(other, 0)

    # -- what the store shows -----------------------------------------------------------------

    def look(self) -> None:
        """Note whether a reader could be misled."""
        self.looks += 1
        shown = {
            key.removeprefix(PREFIX): stored.data for key, stored in self._store.objects.items()
        }
        for key, data in shown.items():
            tag = tag_of(data)
            if tag is None:
                continue
            if data not in self._contents:
                self._complain(f"{key} shows what nobody ever closed: {data!r}")
            for pair in self._pairs.get((*tag, key), ()):
                if not pair.void:
                    self._check(shown, key, pair)

    def _check(self, shown: dict[str, bytes], key: str, pair: Pair) -> None:
        above = key.rpartition("/")[0]
        where = f"{above}/{pair.rel}" if above else pair.rel
        data = shown.get(where)
        if data is None:
            self._complain(f"{key} is shown without {where}")
            return
        tag = tag_of(data)
        if tag is None:
            return  # Emptied since.
        right = tag[0] in pair.others or (tag[0] == pair.uid and tag[1] >= pair.version)
        if not right:
            wanted = f"{pair.uid}:{pair.version}"
            self._complain(f"{key} is shown with {where} as {data!r}, not {wanted}")

    def _complain(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)
            self.on_violation(what)
