"""Does random things to a mount and to the model of it, and compares the bucket in the end."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Awaitable, Callable, Iterable

import trio

from cachefs.model.names import TEMP_PATTERNS, is_temp
from tests.flush.memory import MemoryStore
from tests.flush.tree import Node, Tree, tagged
from tests.flush.watcher import Watcher
from tests.flush.world import OWNER, PREFIX, World

FILES = (
    "a.bin", "b.safetensors", "config.json", "notes.txt", "latest", "model.index.json",
    "x.tmp", "events.out.1", "big.pt",
)  # fmt: skip
DIRECTORIES = ("step1", "step2", "sub", "tmp-dir")

Act = Callable[[], Awaitable[None]]


class Actor:
    """One program that uses the mount."""

    def __init__(self, chance: random.Random, store: MemoryStore, *, note: bool = False) -> None:
        """`note`: print what is done."""
        self.chance = chance
        self.tree = Tree()
        self.watcher = Watcher(self.tree, store)
        self.watcher.on_violation = lambda what: self._say("VIOLATION", what)
        self.world: World
        self.history: list[str] = []
        self._note = note
        self._open: dict[int, Node] = {}
        self._acts: list[tuple[int, Act]] = [
            (10, self._write), (4, self._edit), (3, self._open_more), (4, self._close_one),
            (5, self._unlink), (4, self._mkdir), (2, self._rmdir), (9, self._rename),
            (3, self._rename_directory), (2, self._link), (2, self._symlink), (3, self._chmod),
            (1, self._remove_tree), (2, self._replace), (1, self._exchange), (1, self._evict),
        ]  # fmt: skip

    async def act(self) -> None:
        """One random thing."""
        acts = [act for _, act in self._acts]
        await self.chance.choices(acts, [weight for weight, _ in self._acts])[0]()
        self.check_durable()

    def check_durable(self) -> None:
        """What counts as durable, with nothing pending, the bucket has this moment."""
        for path, node in self.tree.walk("file"):
            if not node.writers and self.world.is_durable(path):
                shown = self.world.store.objects.get(PREFIX + path)
                assert shown is not None and shown.data == node.data, path

    def _say(self, *words: object) -> None:
        line = " ".join(str(word) for word in words)
        self.history.append(line)
        if self._note:
            print(f"{trio.current_time():9.2f} {line}")

    # -- choosing -----------------------------------------------------------------------------

    def _directory(self) -> str:
        return self.chance.choice(["", *self.tree.paths("dir")])

    def _name(self, names: tuple[str, ...]) -> str:
        above, name = self._directory(), self.chance.choice(names)
        return f"{above}/{name}" if above else name

    def _existing(self, kind: str) -> str | None:
        paths = self.tree.paths(kind)
        return self.chance.choice(paths) if paths else None

    def _payload(self) -> bytes:
        size = self.chance.choice([0, 3, 20, 45, 90, 200])
        return bytes(self.chance.choices(b"abcdefgh", k=size))

    # -- content ------------------------------------------------------------------------------

    async def _write(self) -> None:
        path = self._name(FILES)
        node = self.tree.get(path)
        if node is not None and (node.kind != "file" or node.writers):
            return
        await self.rewrite(path, node)

    async def rewrite(self, path: str, node: Node | None) -> None:
        """A file gets new content from its first byte on, and is closed."""
        if node is None:
            node = self.tree.new("file")
            self.tree.put(path, node)
        node.version += 1
        empty = self.chance.random() < 0.05
        node.data = b"" if empty else tagged(node, self._payload())
        self._say("write", path, len(node.data), f"{node.uid}:{node.version}")
        await self.world.write(path, node.data)
        self.watcher.sealed(node)

    async def _edit(self) -> None:
        path = self._existing("file")
        node = self.tree.get(path) if path is not None else None
        if path is None or node is None or node.writers:
            return
        node.version += 1
        head, tail = tagged(node), self._payload()
        offset = self.chance.randint(len(head), max(len(head), len(node.data)))
        self._say("edit", path, offset, len(tail), f"{node.uid}:{node.version}")
        handle = await self.world.files.open(self.world.ino(path), os.O_RDWR)
        await self._splice(handle.fh, node, 0, head)
        if tail:
            await self._splice(handle.fh, node, offset, tail)
        self.world.files.release(handle.fh)
        self.watcher.sealed(node)

    async def _splice(self, fh: int, node: Node, offset: int, data: bytes) -> None:
        await self.world.files.write(fh, offset, data)
        padded = node.data.ljust(offset, b"\0")
        node.data = padded[:offset] + data + padded[offset + len(data) :]

    async def _open_more(self) -> None:
        """Open a file, write, and leave it open."""
        path = self._name(FILES)
        node = self.tree.get(path)
        if node is not None and (node.kind != "file" or node.writers):
            return
        if node is None:
            node = self.tree.new("file")
            self.tree.put(path, node)
            fh = await self.world.create(path)
        else:
            handle = await self.world.files.open(self.world.ino(path), os.O_WRONLY | os.O_TRUNC)
            fh = handle.fh
        self._say("open", path, f"{node.uid}:{node.version + 1}")
        node.version += 1
        node.data, node.writers = b"", 1
        self._open[fh] = node
        await self._splice(fh, node, 0, tagged(node, self._payload()))

    async def _close_one(self) -> None:
        if self._open:
            await self.close(self.chance.choice(sorted(self._open)))

    async def close(self, fh: int) -> None:
        node = self._open.pop(fh)
        node.writers = 0
        self._say("close", node.uid)
        self.world.files.release(fh)
        if any(other is node for _, other in self.tree.walk("file")):
            self.watcher.sealed(node)

    async def _evict(self) -> None:
        path = self._existing("file")
        node = self.tree.get(path) if path is not None else None
        if path is None or node is None or node.writers or self.world.state_of(path) != "durable":
            return
        row = self.world.meta.inodes.get(self.world.ino(path))
        assert row is not None and row.gen is not None
        shown = self.world.meta.objects.of_inode(row.ino)
        if self.world.queue.of_gen(row.gen) or row.ino in self.world.table.inodes:
            return
        if any(each.gen == row.gen and each.etag and not each.stale for each in shown):
            self._say("evict", path)
            self.world.evict(path)

    # -- names --------------------------------------------------------------------------------

    async def _unlink(self) -> None:
        path = self._existing("file") or self._existing("link")
        if path is not None:
            await self.unlink(path)

    async def unlink(self, path: str) -> None:
        self._say("unlink", path)
        self.tree.take(path)
        self.world.unlink(path)
        self.watcher.removed(path)

    async def _mkdir(self) -> None:
        path = self._name(DIRECTORIES)
        if self.tree.get(path) is None and path.count("/") < 3:
            self._say("mkdir", path)
            node = self.tree.new("dir")
            node.mode = 0o755
            self.tree.put(path, node)
            await self.world.mkdir(path)

    async def _rmdir(self) -> None:
        empty = sorted(path for path, node in self.tree.walk("dir") if not node.children)
        if empty:
            await self.rmdir(self.chance.choice(empty))

    async def rmdir(self, path: str) -> None:
        self._say("rmdir", path)
        self.tree.take(path)
        self.world.rmdir(path)

    async def _remove_tree(self) -> None:
        top = self._existing("dir")
        if top is None:
            return
        below = [each for each in self.tree.paths() if each.startswith(top + "/")]
        for path in sorted(below, key=lambda each: (-each.count("/"), self.chance.random())):
            node = self.tree.get(path)
            assert node is not None
            await (self.rmdir(path) if node.kind == "dir" else self.unlink(path))
        await self.rmdir(top)

    async def _rename(self) -> None:
        old = self._existing(self.chance.choice(["file", "file", "file", "link"]))
        if old is None:
            return
        new = self._name(FILES)
        await self.rename(old, new)

    async def rename(self, old: str, new: str) -> None:
        node, target = self.tree.get(old), self.tree.get(new)
        assert node is not None
        if node is target or (target is not None and target.kind == "dir"):
            return
        self._say("rename", old, new, node.uid)
        await self.world.rename(old, new)
        self.tree.put(new, self.tree.take(old))
        self.watcher.renamed(old, new, node)

    async def _rename_directory(self) -> None:
        old, new = self._existing("dir"), self._name(DIRECTORIES)
        if old is None or new == old or new.startswith(old + "/") or new.count("/") > 3:
            return
        await self.rename_directory(old, new)

    async def rename_directory(self, old: str, new: str) -> None:
        node, target = self.tree.get(old), self.tree.get(new)
        assert node is not None
        if target is not None and (target.kind != "dir" or target.children):
            return
        self._say("rename", old + "/", new + "/")
        await self.world.rename(old, new)
        self.tree.put(new, self.tree.take(old))
        self.watcher.renamed(old, new, node)

    async def _replace(self) -> None:
        """Save as programs do that want no torn file: beside it, then rename over it."""
        path = self._existing("file")
        node = self.tree.get(path) if path is not None else None
        if path is None or node is None:
            return
        beside = path + ".tmp" if self.chance.random() < 0.7 else path + ".new"
        if self.tree.get(beside) is None:
            await self.rewrite(beside, None)
            if self.chance.random() < 0.5:
                await trio.sleep(self.chance.choice([0.01, 2.0]))
            await self.rename(beside, path)

    async def _exchange(self) -> None:
        one, other = self._existing("file"), self._existing("file")
        if one is None or other is None or one == other:
            return
        try:
            await self.world.rename(one, other, 2)
        except OSError:
            return  # Not all can be.
        self._say("exchange", one, other)
        first, second = self.tree.take(one), self.tree.take(other)
        self.tree.put(one, second)
        self.tree.put(other, first)
        self.watcher.exchanged(one, other)

    async def _link(self) -> None:
        path, new = self._existing("file"), self._name(FILES)
        node = self.tree.get(path) if path is not None else None
        if path is None or node is None or self.tree.get(new) is not None:
            return
        self._say("link", path, new)
        self.tree.put(new, node)
        await self.world.link(path, new)
        self.watcher.linked(new, node)

    async def _symlink(self) -> None:
        path = self._name(("last.ckpt", "current"))
        if self.tree.get(path) is None:
            node = self.tree.new("link")
            node.target = f"target-{self.chance.randrange(100)}"
            self._say("symlink", path, node.target)
            self.tree.put(path, node)
            await self.world.symlink(path, node.target)

    async def _chmod(self) -> None:
        path = self._existing(self.chance.choice(["file", "file", "dir"]))
        node = self.tree.get(path) if path is not None else None
        if path is not None and node is not None:
            node.mode = self.chance.choice([0o644, 0o600, 0o755])
            self._say("chmod", path, oct(node.mode))
            self.world.chmod(path, node.mode)

    # -- ends ---------------------------------------------------------------------------------

    async def wake(self, world: World) -> None:
        """After a crash: what was open for writing is written anew, as a restarted program does."""
        self.world = world
        lost, self._open = self._open, {}
        for node in lost.values():
            node.writers = 0
            paths = sorted(path for path, other in self.tree.walk("file") if other is node)
            if paths:
                await self.rewrite(paths[0], node)
        self.check_durable()

    async def finish(self) -> None:
        """Close everything, and give what has a temporary name one that counts."""
        for fh in sorted(self._open):
            await self.close(fh)
        for count in range(1000):
            temporary = [p for p in self.tree.paths() if is_temp(TEMP_PATTERNS, p)]
            if not temporary:
                return
            path = min(temporary, key=lambda each: (each.count("/"), each))
            above, _, _ = path.rpartition("/")
            new = f"{above}/final{count}" if above else f"final{count}"
            node = self.tree.get(path)
            assert node is not None
            await (self.rename_directory if node.kind == "dir" else self.rename)(path, new)

    def expected(self) -> dict[str, bytes]:
        """What the bucket is to show, but for markers of directories that have entries again."""
        found: dict[str, bytes] = {}
        for path, node in self.tree.walk():
            if node.kind == "file":
                found[path] = node.data
            elif node.kind == "link":
                found[path] = node.target.encode()
            elif not node.children or node.mode != 0o755:
                found[path + "/"] = b""
        return dict(sorted(found.items()))

    def _shown(self) -> dict[str, bytes]:
        wanted = self.expected()
        extra = {f"{path}/" for path in self.tree.paths("dir")} - wanted.keys()
        return {key: data for key, data in self.world.shown.items() if key not in extra}

    def check(self) -> None:
        """Compare the bucket with the tree."""
        world = self.world
        assert not self.watcher.violations
        assert self._shown() == self.expected()
        for path, node in self.tree.walk():
            key = path + "/" if node.kind == "dir" else path
            if PREFIX + key not in world.store.objects:
                continue
            row = world.namespace.get(world.ino(path))
            tags = world.metadata(key)
            assert tags["mode"] == str(row.mode), path
            assert (tags["uid"], tags["gid"]) == tuple(str(each) for each in OWNER)
            if node.kind == "file":
                seconds, rest = divmod(row.mtime_ns, 10**9)
                assert tags["mtime"] == f"{seconds}.{rest:09d}", path
        self._check_leftovers()

    def _check_leftovers(self) -> None:
        world = self.world
        assert not world.store.uploads
        assert not world.meta.uploads.all()
        files = set(world.device.list_generations())
        assert files == world.meta.generations.files(0)
        assert not world.meta.effects.all()
        # A marker may have become pointless before its request was answered.
        found = world.meta.objects.below("")
        rows = {row.key: row for row in found if row.etag or not row.key.endswith("/")}
        assert _files(rows) == _files(world.shown)
        for key, row in rows.items():
            stored = world.store.objects[PREFIX + key]
            stale = key.endswith("/") and row.stale  # A marker that another directory had.
            assert (row.etag, row.stale, row.intents) == (stored.etag, stale, None), key
            assert row.meta is not None and json.loads(row.meta) == stored.metadata, key


def _files(keys: Iterable[str]) -> set[str]:
    return {key for key in keys if not key.endswith("/")}
