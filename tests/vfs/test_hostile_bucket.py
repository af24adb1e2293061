"""Whatever a bucket holds, written by whomever: nothing escapes from the mount, nothing fails."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
import trio
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cachefs.errors import NotFound
from cachefs.meta import Meta
from cachefs.meta.invariants import INVARIANTS
from cachefs.meta.rows import InodeRow
from cachefs.vfs.plausible import PlausibleReader
from cachefs.vfs.remote import RemoteObject, RemoteView
from tests.support import scratch

MAY_BE_BROKEN = {"impossible-key"}
"""What a bucket itself may break, since its keys are kept as they are."""

ODD = (
    "",
    ".",
    "..",
    "\0",
    "x\0y",
    "new\nline",
    "\x1b[2J",
    "back\\slash",
    "\u202e",
    "\ud800",
    "/",
    " ",
)
pieces = st.sampled_from(
    [*ODD, "a", "b", "a" * 255, "a" * 256, "é" * 200, ".cachefs", "id", "%2e%2e", "~", "-rf"]
) | st.text(max_size=8)
keys = st.lists(pieces, min_size=1, max_size=4).map("/".join)
numbers = st.integers(-(2**80), 2**80)
texts = st.text(max_size=30)
blobs = st.dictionaries(texts | st.just("user.x"), texts | st.just("AAAA"), max_size=3).map(
    lambda values: quote(json.dumps(values))
)
metadata = st.fixed_dictionaries(
    {},
    optional={
        "mode": texts | numbers.map(str),
        "uid": texts | numbers.map(str),
        "gid": texts | numbers.map(str),
        "mtime": texts | numbers.map(str) | st.floats().map(str),
        "xattr": texts | blobs | st.just("%7B" * 400) | st.just(quote("[" * 20_000)),
        "odd": texts,
    },
)


@st.composite
def objects(draw: st.DrawFn) -> RemoteObject:
    fields = tuple(draw(metadata).items())
    return RemoteObject(draw(keys), draw(numbers), draw(texts), draw(numbers), None, fields)


class Bucket:
    """Lists and answers as S3 does, with no sense of what a path is."""

    def __init__(self, items: Sequence[RemoteObject]) -> None:
        self._items = {item.key: item for item in items}

    async def list_page(
        self, prefix: str, token: str | None
    ) -> tuple[list[RemoteObject], list[str], str | None]:
        await trio.lowlevel.checkpoint()
        found, prefixes = [], set()
        for key, item in self._items.items():
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if "/" in rest:
                prefixes.add(prefix + rest.split("/")[0] + "/")
            else:
                found.append(item)
        return found, sorted(prefixes), None

    async def head(self, key: str) -> RemoteObject:
        await trio.lowlevel.checkpoint()
        if key not in self._items:
            raise NotFound(key)
        return self._items[key]

    async def read(self, key: str, limit: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return b"../" * 10


def _view(meta: Meta, items: list[RemoteObject]) -> RemoteView:
    return RemoteView(meta, PlausibleReader(Bucket(items)), uid=1, gid=1)


async def _walk(meta: Meta, view: RemoteView) -> None:
    waiting = [1]
    while waiting:
        row = meta.inodes.get(waiting.pop())
        assert row is not None
        await view.ensure_listed(row)
        children = [inode for _, _, inode in meta.inodes.children(row.ino, 0, 10_000)]
        await view.know_all(children)
        for inode in children:
            await view.know(inode)
            assert stat.S_IFMT(inode.mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
            assert 0 <= inode.uid < 2**32 - 1 and 0 <= inode.gid < 2**32 - 1
            assert 0 <= inode.size < 2**63
            waiting += [inode.ino] if stat.S_ISDIR(inode.mode) else []


@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(items=st.lists(objects(), max_size=12))
def test_any_bucket_can_be_walked(items: list[RemoteObject]) -> None:
    with scratch.directory("/dev/shm") as place:
        meta = Meta(place / "db")
        meta.inodes.add(InodeRow(1, stat.S_IFDIR | 0o755, 0, 0, 2, 4096, 0, 0, 0))
        trio.run(_walk, meta, _view(meta, items))
        for invariant in INVARIANTS:
            if invariant.name not in MAY_BE_BROKEN:
                assert meta.db.all(invariant.sql) == [], invariant.name
        meta.close()


@pytest.mark.parametrize("key", ["../x", "a//b", "/abs", "./x", "a/../b", "x\0y", "a/" + "n" * 256])
def test_names_that_lead_elsewhere_are_not_shown(tmp_path: Path, key: str) -> None:
    meta = Meta(tmp_path / "db")
    meta.inodes.add(InodeRow(1, stat.S_IFDIR | 0o755, 0, 0, 2, 4096, 0, 0, 0))
    item = RemoteObject(key, 1, "e", 0, None, ())
    trio.run(_walk, meta, _view(meta, [item]))
    names = {bytes(row[0]) for row in meta.db.all("SELECT name FROM dentry")}
    assert names <= {b"a"}
    meta.close()
