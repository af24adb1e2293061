"""What a tree should look like: a plain model of names and content, with no idea of a bucket."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

TAG = re.compile(rb"<(\d{5}):(\d{5})>")


@dataclass(eq=False)
class Node:
    """A file, directory or symlink."""

    uid: int
    kind: str
    data: bytes = b""
    version: int = 0
    sealed: int = 0
    """The last version that was closed; 0: none yet."""
    writers: int = 0
    mode: int = 0o644
    target: str = ""
    children: dict[str, Node] = field(default_factory=dict)


def tagged(node: Node, payload: bytes = b"") -> bytes:
    """Content of the node's version that says whose it is."""
    return b"<%05d:%05d>" % (node.uid, node.version) + payload


def tag_of(data: bytes) -> tuple[int, int] | None:
    """(node, version) of content."""
    found = TAG.match(data)
    return (int(found[1]), int(found[2])) if found else None


class Tree:
    """Paths to nodes."""

    def __init__(self) -> None:
        self.root = Node(0, "dir")
        self._uids = 0

    def new(self, kind: str) -> Node:
        self._uids += 1
        return Node(self._uids, kind)

    def get(self, path: str) -> Node | None:
        node: Node | None = self.root
        for part in path.split("/") if path else ():
            node = node.children.get(part) if node is not None else None
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        above, _, name = path.rpartition("/")
        parent = self.get(above)
        assert parent is not None, path
        return parent, name

    def put(self, path: str, node: Node) -> None:
        parent, name = self._parent(path)
        parent.children[name] = node

    def take(self, path: str) -> Node:
        parent, name = self._parent(path)
        return parent.children.pop(name)

    def walk(self, kind: str | None = None) -> Iterator[tuple[str, Node]]:
        """(path, node) of everything, or of one kind."""
        todo = [("", self.root)]
        while todo:
            path, node = todo.pop()
            for name, child in node.children.items():
                below = f"{path}/{name}" if path else name
                if kind is None or child.kind == kind:
                    yield below, child
                todo.append((below, child))

    def paths(self, kind: str | None = None) -> list[str]:
        return sorted(path for path, _ in self.walk(kind))
