"""`status` and `ls`."""

from __future__ import annotations

import json
import time
from typing import Any

from cachefs.cli.status import _mount_parts, _path_parts
from cachefs.errors import Refused
from cachefs.vfs.attributes import ROOT
from tests.cli.fake import MOUNT
from tests.daemon.lab import ME, Lab, fails, in_lab, until

# ---- a mount --------------------------------------------------------------------------------


@in_lab()
async def test_a_mount_at_rest(lab: Lab) -> None:
    told = await lab.ask("status")
    assert json.loads(json.dumps(told)) == told
    assert MOUNT.keys() <= told.keys()
    assert told["mountpoint"] == "/mnt/ckpt"
    assert told["store"].startswith("file:///")
    assert told["node"] == "n1"
    assert told["lanes"] == {"passthrough": False, "reason": "no kernel here"}
    assert told["takeovers"] == 2
    assert 0 <= told["uptime_seconds"] < 30
    assert told["oldest_dirty_seconds"] == 0
    for name in ("dirty_bytes", "dirty_files", "uploading_bytes", "stalled_files"):
        assert told[name] == 0
    for name in ("effects", "errors", "checkpoints"):
        assert told[name] == []
    (device,) = told["cache"]["devices"]
    assert MOUNT["cache"]["devices"][0].keys() <= device.keys()
    assert told["cache"]["size_bytes"] == device["size_bytes"] == 256 << 20
    assert list(_mount_parts(told))


@in_lab()
async def test_dirty_files_and_bytes(lab: Lab) -> None:
    """Open files count as they grow; a directory counts by its entries."""
    await lab.write("d/f.bin", b"x" * 5000)
    told = await lab.ask("status")
    assert (told["dirty_files"], told["dirty_bytes"]) == (1, 5000)
    assert 0 < told["oldest_dirty_seconds"] < 10
    fh = await lab.open("d/log")
    await lab.put(fh, b"x" * 30)
    told = await lab.ask("status")
    assert (told["dirty_files"], told["dirty_bytes"]) == (2, 5030)
    lab.close(fh)
    await lab.wait()
    told = await lab.ask("status")
    assert (told["dirty_files"], told["dirty_bytes"], told["effects_total"]) == (0, 0, 0)


@in_lab()
async def test_changes_without_content_are_dirty_too(lab: Lab) -> None:
    """Else a rename or a symlink would look as if the store had it."""
    await lab.write("a")
    await lab.wait()
    await lab.services.namespace.symlink(ROOT, b"last", b"a", ME)
    assert (await lab.ask("status"))["dirty_files"] == 1
    await lab.wait()
    lab.services.namespace.set_attributes(2, mode=0o600)
    assert (await lab.ask("status"))["dirty_files"] == 1
    await lab.wait()
    assert (await lab.ask("status"))["dirty_files"] == 0


@in_lab()
async def test_uploading(lab: Lab) -> None:
    lab.bucket.hold()
    await lab.write("f.bin", b"x" * 100)
    await lab.write("g.bin", b"x" * 100)
    answer = lab.asking(lambda: lab.wait("f.bin"))
    await until(lambda: lab.bucket.waiting)
    told = await lab.ask("status")
    assert told["uploading_bytes"] == 100
    states = {each["path"]: each["state"] for each in told["effects"]}
    assert states == {"/mnt/ckpt/f.bin": "uploading", "/mnt/ckpt/g.bin": "pending"}
    lab.bucket.let_go()
    await answer


@in_lab()
async def test_what_waits_for_what(lab: Lab) -> None:
    await lab.write("d/s1.bin")
    await lab.write("d/s2.bin")
    await lab.write("d/latest")
    await lab.write("x.tmp")
    effects = {each["path"]: each for each in (await lab.ask("status"))["effects"]}
    latest = effects["/mnt/ckpt/d/latest"]
    assert latest["class"] == "barrier"
    assert latest["kind"] == "publish"
    assert latest["state"] == "pending"
    assert {"/mnt/ckpt/d/s1.bin", "/mnt/ckpt/d/s2.bin"} <= set(latest["waits_for"])
    assert effects["/mnt/ckpt/d/s1.bin"]["waits_for"] == []
    assert effects["/mnt/ckpt/x.tmp"]["state"] == "held"


@in_lab()
async def test_trouble(lab: Lab) -> None:
    lab.bucket.refused["d/s.bin"] = Refused("403 AccessDenied")
    lab.bucket._store.put("c.bin", b"theirs", metadata={})
    await lab.write("d/s.bin")
    await lab.write("c.bin")
    await lab.write("d/latest")
    await fails(lab.wait("d/s.bin"), 5)
    await fails(lab.wait("c.bin"), 5)
    told = await lab.ask("status")
    assert told["stalled_files"] == 1
    assert {"path": "/mnt/ckpt/d/s.bin", "error": "403 AccessDenied"} in told["errors"]
    assert {each["path"] for each in told["errors"]} == {"/mnt/ckpt/d/s.bin", "/mnt/ckpt/c.bin"}
    effects = {each["path"]: each for each in told["effects"]}
    assert effects["/mnt/ckpt/d/s.bin"]["state"] == "stalled"
    assert effects["/mnt/ckpt/d/s.bin"]["error"] == "403 AccessDenied"
    assert effects["/mnt/ckpt/c.bin"]["state"] == "conflicted"
    assert effects["/mnt/ckpt/d/latest"]["state"] == "blocked"
    assert set(effects["/mnt/ckpt/d/latest"]["waits_for"]) <= set(effects)
    assert list(_mount_parts(told))


@in_lab()
async def test_held_since_a_crash(lab: Lab) -> None:
    await lab.write("f.bin")
    await lab.wait()
    lab.services.meta.generations.set_state(1, "held", "its writer is gone")
    told = await lab.ask("status")
    assert told["errors"] == [{"path": "/mnt/ckpt/f.bin", "error": "its writer is gone"}]
    assert told["dirty_files"] == 1


@in_lab(flusher=False)
async def test_thousands_pending(lab: Lab) -> None:
    """The answer is bounded, and the daemon has time for others."""
    with lab.services.meta.transaction():
        for number in range(3000):
            await lab.write(f"d/f{number}.json")
    began = time.monotonic()
    told = await lab.ask("status")
    assert time.monotonic() - began < 2
    assert told["dirty_files"] == told["dirty_bytes"] == 3000
    assert told["effects_total"] == 3001
    assert len(told["effects"]) == 100
    assert all(len(each["waits_for"]) <= 5 for each in told["effects"])
    assert len(json.dumps(told)) < 100_000


# ---- a path ---------------------------------------------------------------------------------


@in_lab()
async def test_a_file(lab: Lab) -> None:
    await lab.write("d/f.bin", b"x" * 50)
    told = await lab.ask("status", path="d/f.bin")
    assert told["path"] == "/mnt/ckpt/d/f.bin"
    assert (told["state"], told["size"], told["dirty_bytes"]) == ("dirty", 50, 50)
    assert told["lane"] == "tracked"
    assert told["url"].endswith("/d/f.bin")
    await lab.wait()
    told = await lab.ask("status", path="d/f.bin")
    assert (told["state"], told["survives"], told["dirty_bytes"]) == ("durable", "site", 0)
    assert told["etag"]
    assert list(_path_parts(told))


@in_lab()
async def test_a_file_that_waits(lab: Lab) -> None:
    await lab.write("s.bin")
    await lab.write("latest")
    assert (await lab.ask("status", path="latest"))["waits_for"] == ["/mnt/ckpt/s.bin"]


@in_lab()
async def test_a_directory(lab: Lab) -> None:
    await lab.write("d/e/f.bin", b"x" * 50)
    fh = await lab.open("d/g")
    await lab.put(fh, b"x" * 7)
    told = await lab.ask("status", path="d")
    assert (told["state"], told["dirty_bytes"], told["survives"]) == ("dirty", 57, "process")
    lab.close(fh)
    await lab.write("other.bin", b"x" * 50)
    await lab.wait("d")
    told = await lab.ask("status", path="d")
    assert (told["state"], told["dirty_bytes"], told["survives"]) == ("durable", 0, "site")
    assert list(_path_parts(told))
    assert (await lab.ask("status", path=""))["dirty_bytes"] == 50


@in_lab()
async def test_a_directory_in_trouble(lab: Lab) -> None:
    lab.bucket.refused["d/f.bin"] = Refused("403")
    await lab.write("d/f.bin")
    await fails(lab.wait(), 5)
    told = await lab.ask("status", path="d")
    assert (told["state"], told["error"]) == ("stalled", "403")


@in_lab()
async def test_paths_that_are_not_there(lab: Lab) -> None:
    assert "/mnt/ckpt/missing" in await fails(lab.ask("status", path="missing"), 1)
    assert "/mnt/ckpt/missing" in await fails(lab.ask("ls", path="missing"), 1)
    await fails(lab.handlers["ls"]({}, _mute), 2)
    await fails(lab.handlers["status"]({"path": "relative"}, _mute), 2)


@in_lab()
async def test_symlinks_are_not_followed(lab: Lab) -> None:
    await lab.write("d/f.bin", b"x" * 50)
    await lab.services.namespace.symlink(ROOT, b"link", b"d", ME)
    assert (await lab.ask("ls", path="link"))["entries"][0]["type"] == "symlink"
    assert "Not a directory" in await fails(lab.ask("status", path="link/f.bin"), 1)


# ---- ls -------------------------------------------------------------------------------------


@in_lab()
async def test_ls(lab: Lab) -> None:
    await lab.write("d/f.bin", b"x" * 50)
    await lab.write("d/e/g.bin")
    d = await lab.folder("d")
    await lab.services.namespace.symlink(d, b"last", b"f.bin", ME)
    entries = {each["name"]: each for each in (await lab.ask("ls", path="d"))["entries"]}
    assert entries.keys() == {"f.bin", "e", "last"}
    file = entries["f.bin"]
    assert (file["type"], file["size"], file["state"]) == ("file", 50, "dirty")
    assert abs(file["mtime"] - time.time()) < 30
    assert (entries["e"]["type"], entries["e"]["state"]) == ("dir", None)
    assert (entries["last"]["type"], entries["last"]["size"]) == ("symlink", 5)


@in_lab()
async def test_ls_of_a_file_and_of_an_open_one(lab: Lab) -> None:
    fh = await lab.open("d/f")
    await lab.put(fh, b"x" * 9)
    (entry,) = (await lab.ask("ls", path="d/f"))["entries"]
    assert (entry["name"], entry["size"], entry["state"]) == ("f", 9, "open")
    lab.close(fh)


@in_lab(flusher=False)
async def test_ls_of_many(lab: Lab) -> None:
    with lab.services.meta.transaction():
        for number in range(450):
            await lab.write(f"d/f{number}")
    entries = (await lab.ask("ls", path="d"))["entries"]
    assert [each["name"] for each in entries] == [f"f{number}" for number in range(450)]


async def _mute(values: Any, /) -> None:
    """Progress that nobody reads."""
