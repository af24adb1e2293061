"""Renames there and back while the bucket is on its way: it ends with what the files hold."""

from __future__ import annotations

import errno
from typing import Any

import trio

from cachefs.errors import Refused
from cachefs.vfs.attributes import ROOT
from cachefs.vfs.namespace import RENAME_EXCHANGE
from tests.daemon.lab import Lab, in_lab, until


@in_lab()
async def test_back_while_the_old_key_is_being_deleted(lab: Lab) -> None:
    await lab.write("a.bin", b"one")
    await lab.wait()
    lab.bucket.hold("delete")
    await lab.write("a.bin", b"two")
    await lab.rename("a.bin", "b.bin")
    waiting = lab.asking(lab.wait)
    await until(lambda: lab.bucket.waiting and lab.bucket.keys() == ["a.bin", "b.bin"])
    await lab.rename("b.bin", "a.bin")
    lab.bucket.let_go()
    await waiting
    await lab.wait()
    assert lab.bucket.keys() == ["a.bin"]
    assert lab.bucket.get("a.bin") == b"two"


@in_lab()
async def test_back_before_the_old_key_is_deleted(lab: Lab) -> None:
    """The old key shows the old content: it is not the file's any more."""
    await lab.write("a.bin", b"one")
    await lab.wait()
    lab.bucket.refused["c.bin"] = Refused("403 AccessDenied")
    await lab.write("a.bin", b"two")
    await lab.write("c.bin", b"holds up the deletion")
    await lab.rename("a.bin", "b.bin")
    lab.services.queue.hurry(lab.services.queue.effects)
    await until(lambda: lab.bucket.keys() == ["a.bin", "b.bin"])
    await lab.rename("b.bin", "a.bin")
    del lab.bucket.refused["c.bin"]
    await lab.remove("c.bin")
    await lab.wait()
    assert lab.bucket.keys() == ["a.bin"]
    assert lab.bucket.get("a.bin") == b"two"


@in_lab()
async def test_attributes_changed_while_nothing_is_written(lab: Lab) -> None:
    """Open for writing, closed without a write: new attributes and names go out all the same."""
    await lab.write("a.bin", b"one")
    await lab.wait()
    fh = await lab.open("a.bin")
    row = lab.services.meta.inodes.lookup(1, b"a.bin")
    assert row is not None
    lab.services.namespace.set_attributes(row.ino, mode=0o600)
    await lab.services.namespace.link(row.ino, 1, b"linked.bin")
    lab.close(fh)
    await lab.wait()
    assert lab.bucket.keys() == ["a.bin", "linked.bin"]
    for key in ("a.bin", "linked.bin"):
        assert lab.bucket.mode(key) & 0o777 == 0o600


@in_lab()
async def test_removed_before_the_old_key_is_deleted(lab: Lab) -> None:
    """Renamed, copied in the bucket, then removed: both keys go. The same when it is replaced."""
    for name in ("a.bin", "x.bin"):
        await lab.write(name, b"one")
    await lab.wait()
    lab.bucket.refused["c.bin"] = Refused("403 AccessDenied")
    await lab.write("c.bin", b"holds up the deletions")
    await lab.rename("a.bin", "b.bin")
    await lab.rename("x.bin", "y.bin")
    lab.services.queue.hurry(lab.services.queue.effects)
    await trio.sleep(0.2)
    del lab.bucket.refused["c.bin"]
    await lab.write("z.bin", b"two")
    await lab.remove("b.bin")
    await lab.rename("z.bin", "y.bin")
    await lab.remove("c.bin")
    await lab.wait()
    assert lab.bucket.keys() == ["y.bin"]
    assert lab.bucket.get("y.bin") == b"two"


@in_lab()
async def test_a_marker_removed_after_data_and_a_rename(lab: Lab) -> None:
    """Its deletion waits for the copy, and that for the deletion of the data."""
    for name in ("a.bin", "b.bin", "c.bin", "latest"):
        await lab.write(name, name.encode())
    await lab.wait()
    await lab.remove("a.bin")
    await lab.rename("b.bin", "c.bin")
    await lab.remove("latest")
    await lab.wait(timeout=10)
    assert lab.bucket.keys() == ["c.bin"]
    assert lab.bucket.get("c.bin") == b"b.bin"


@in_lab()
async def test_over_a_name_whose_content_is_being_sent(lab: Lab) -> None:
    """Both are on their way; the replaced one arrives last, under the name that both have had."""
    gates = {"a.json": trio.Event(), "b.json": trio.Event()}
    asked: list[str] = []
    call = lab.bucket.call

    async def gated(method: str, /, **arguments: Any) -> Any:
        if method == "put" and arguments["key"] in gates:
            asked.append(arguments["key"])
            await gates[arguments["key"]].wait()
        return await call(method, **arguments)

    lab.bucket.call = gated  # type: ignore[method-assign]
    await lab.write("a.json", b"one")
    await lab.write("b.json", b"two")
    lab.services.queue.hurry(lab.services.queue.effects)
    await until(lambda: len(asked) == 2)
    await lab.rename("b.json", "a.json")
    gates["b.json"].set()
    await until(lambda: "b.json" in lab.bucket.keys())  # noqa: SIM118
    gates["a.json"].set()
    await lab.wait()
    assert lab.bucket.keys() == ["a.json"]
    assert lab.bucket.get("a.json") == b"two"


@in_lab()
async def test_a_name_removed_before_it_is_shown(lab: Lab) -> None:
    """A file is durable once the names that it still has are shown."""
    for refused in (False, True):
        fh = await lab.open("a.bin")
        await lab.put(fh, b"one")
        row = lab.services.meta.inodes.lookup(1, b"a.bin")
        assert row is not None
        await lab.services.namespace.link(row.ino, 1, b"b.txt")
        if refused:
            lab.bucket.refused["b.txt"] = Refused("403 AccessDenied")
        else:
            lab.bucket.hold("copy")
        lab.close(fh)
        lab.services.queue.hurry(lab.services.queue.effects)
        await until(lambda: lab.bucket.keys() == ["a.bin"])
        await trio.sleep(0.1)
        lab.bucket.refused.clear()
        await lab.remove("b.txt")
        lab.bucket.let_go()
        await lab.wait(timeout=10)
        assert lab.services.meta.generations.of_inode(row.ino)[0].state == "durable"
        await lab.remove("a.bin")
        await lab.wait(timeout=10)
        assert lab.bucket.keys() == []


async def _going_out(lab: Lab) -> None:
    """Its object is about to appear under `foo`, whatever becomes of the file."""
    await lab.write("foo", b"a file")
    lab.bucket.hold("put")
    lab.services.queue.hurry(lab.services.queue.effects)
    await until(lambda: lab.bucket.waiting == 1)


async def _becomes_a_directory(lab: Lab) -> None:
    await lab.folder("foo")
    await lab.write("foo/bar", b"below")
    lab.services.queue.hurry(lab.services.queue.effects)
    lab.bucket.let_go()
    with trio.fail_after(5):
        await lab.wait()
    assert lab.bucket.get("foo/bar") == b"below"


@in_lab()
async def test_a_directory_where_a_removed_file_still_goes_out(lab: Lab) -> None:
    """A store of files can hold only one of them: the file has to go first."""
    await _going_out(lab)
    await lab.remove("foo")
    await _becomes_a_directory(lab)
    assert lab.bucket.keys() == ["foo/bar"]


@in_lab()
async def test_a_directory_where_a_renamed_file_still_goes_out(lab: Lab) -> None:
    await _going_out(lab)
    await lab.rename("foo", "moved")
    await _becomes_a_directory(lab)
    assert lab.bucket.keys() == ["foo/bar", "moved"]
    assert lab.bucket.get("moved") == b"a file"


@in_lab()
async def test_a_file_where_a_removed_one_below_still_goes_out(lab: Lab) -> None:
    lab.bucket.hold("put")
    await lab.write("foo/bar", b"below")
    lab.services.queue.hurry(lab.services.queue.effects)
    await until(lambda: lab.bucket.waiting == 1)
    await lab.remove("foo/bar")
    await lab.remove("foo")
    await lab.write("foo", b"a file")
    lab.services.queue.hurry(lab.services.queue.effects)
    lab.bucket.let_go()
    with trio.fail_after(5):
        await lab.wait()
    assert lab.bucket.keys() == ["foo"]
    assert lab.bucket.get("foo") == b"a file"


@in_lab()
async def test_a_file_that_is_shown_does_not_change_places_with_a_directory(lab: Lab) -> None:
    """It is refused, or done: never half done for ever."""
    await lab.write("a", b"a file")
    await lab.wait()
    await lab.write("d/in", b"below")
    expected = {"a": b"a file", "d/in": b"below"}
    try:
        lab.services.namespace.rename(ROOT, b"a", ROOT, b"d", RENAME_EXCHANGE)
    except OSError as error:
        assert error.errno == errno.EINVAL
    else:
        expected = {"d": b"a file", "a/in": b"below"}
    with trio.fail_after(5):
        await lab.wait()
    shown = lab.bucket.keys()
    assert {key: lab.bucket.get(key) for key in shown} == expected
