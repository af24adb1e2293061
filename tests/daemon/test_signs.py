"""Markers, pointers and symlinks in the warm tier: when they are shown, and when they go."""

from __future__ import annotations

import os

import pytest

from cachefs.cache.warmdir import Shown
from cachefs.model.manifests import Manifest, Part, encode, manifest_key
from tests.daemon.tier import Warm, in_tier, save


@pytest.mark.parametrize("sign", ["marker", "pointer", "number", "symlink", "absolute"])
@in_tier()
async def test_a_sign_waits_for_what_it_tells_of(warm: Warm, sign: str) -> None:
    """A file of the checkpoint left the cache before it was copied, and comes back when read."""
    await warm.only_in_store("run/step-1/a.bin")
    path = "run/step-1/_SUCCESS" if sign == "marker" else "run/latest"
    texts = {"marker": "", "pointer": "step-1", "number": "1"}
    if sign in texts:
        await warm.write(path, texts[sign])
    else:
        await warm.link(path, "step-1" if sign == "symlink" else "/mnt/ckpt/run/step-1")
    await warm.write("run/other.bin")
    await warm.settle()
    assert set(warm.shown()) == {"run/other.bin"}
    assert warm.tiering.status()["files_withheld"] == 1
    assert await warm.read("run/step-1/a.bin") == b"x"
    await warm.settle()
    assert set(warm.shown()) == {"run/other.bin", "run/step-1/a.bin", path}
    assert warm.tiering.status()["files_withheld"] == 0


@in_tier()
async def test_what_is_withheld_is_no_reason_for_further_rounds(warm: Warm) -> None:
    await warm.only_in_store("step-1/a.bin")
    await warm.write("step-1/_SUCCESS")
    await warm.write("step-1/later.done")
    await warm.settle()
    kicks = warm.kicks
    assert not await warm.round()
    assert not await warm.round()
    assert warm.kicks == kicks, "nobody is woken for nothing"
    assert list((warm.directory / ".cachefs/staging").rglob("*")) == [
        warm.directory / ".cachefs/staging/n1.d"
    ], "nothing is copied in vain"


@in_tier()
async def test_a_marker_waits_for_those_before_it(warm: Warm) -> None:
    """The index is withheld for a shard that it names; what was closed after it follows it."""
    shard = "model-00001-of-00001.safetensors"
    index = f'{{"weight_map": {{"w": "{shard}"}}}}'
    await warm.write("d/model.safetensors.index.json", index)
    await warm.write("d/_SUCCESS")
    await warm.settle()
    assert warm.shown() == {}
    await warm.write(f"d/{shard}")
    await warm.settle()
    assert len(warm.shown()) == 3


@in_tier()
async def test_logs_and_temporary_names_are_waited_for_by_nobody(warm: Warm) -> None:
    await warm.only_in_store("step-1/train.log")
    await warm.write("step-1/a.bin.tmp")
    fh = await warm.lab.open("step-1/b.bin")
    await warm.write("step-1/_SUCCESS")
    await warm.settle()
    assert set(warm.shown()) == {"step-1/_SUCCESS"}
    warm.lab.close(fh)


@in_tier()
async def test_a_file_that_is_rewritten_is_there_as_it_was(warm: Warm) -> None:
    await warm.write("step-1/a.bin", "one")
    await warm.settle()
    fh = await warm.lab.open("step-1/a.bin", os.O_WRONLY | os.O_TRUNC)
    await warm.write("step-1/_SUCCESS", "")
    await warm.settle()
    assert warm.shown() == {"step-1/a.bin": "one", "step-1/_SUCCESS": ""}
    warm.lab.close(fh)


@in_tier()
async def test_a_name_of_what_is_nowhere_is_not_shown(warm: Warm) -> None:
    await warm.write("latest", "step-7")
    await warm.settle()
    assert warm.shown() == {}
    await save(warm, 7)
    await warm.settle()
    assert warm.shown() == {"latest": "step-7", "step-7/a.bin": "a7", "step-7/_SUCCESS": "x"}


@in_tier()
async def test_what_others_put_there_counts(warm: Warm) -> None:
    """Another node's file of the checkpoint, known from the bucket, and its copy in the tier."""
    await warm.write("step-1/a.bin")
    await warm.lab.wait()
    await warm.lab.bucket.call("put", key="step-1/b.bin", body=b"12345", metadata={})
    folder = await warm.lab.folder("step-1")
    await warm.lab.parts.refresher.rounds.run(folder)
    await warm.write("step-1/_SUCCESS")
    await warm.settle()
    assert set(warm.shown()) == {"step-1/a.bin"}
    (warm.directory / "step-1/b.bin").write_text("1234")
    await warm.settle()
    assert "step-1/_SUCCESS" not in warm.shown(), "not all of it yet"
    (warm.directory / "step-1/b.bin").write_text("12345")
    await warm.settle()
    assert "step-1/_SUCCESS" in warm.shown()


@in_tier("checkpoint.nodes=2")
async def test_with_several_nodes_a_marker_waits_for_the_bucket(warm: Warm) -> None:
    await save(warm, 1)
    await warm.settle()
    assert set(warm.shown()) == {"step-1/a.bin"}
    assert warm.lab.bucket.keys() == []
    gens = [row.gen for row in warm.lab.parts.queue.effects.values() if row.gen]
    assert [warm.tier.will_have(gen) for gen in gens] == [False, False], "it is there, or waits"
    warm.lab.parts.queue.may_pass = lambda row: True  # The other node has answered.
    await warm.lab.wait()
    await warm.settle()
    assert set(warm.shown()) == {"step-1/a.bin"}, "the other has not said what it saved"
    part = Part("step-1/b.bin", 5, "etag")
    manifest = encode(Manifest("step-1", "n2", 2, 1.0, (part,)))
    await warm.lab.bucket.call("put", key=manifest_key("step-1", "n2"), body=manifest, metadata={})
    await warm.settle()
    assert set(warm.shown()) == {"step-1/a.bin"}, "the other's copy is not here yet"
    (warm.directory / "step-1/b.bin").write_text("12345")
    await warm.settle()
    assert set(warm.shown()) == {"step-1/a.bin", "step-1/b.bin", "step-1/_SUCCESS"}


@in_tier()
async def test_a_wait_for_a_withheld_marker_goes_to_the_store(warm: Warm) -> None:
    await warm.only_in_store("step-1/a.bin")
    await warm.write("step-1/_SUCCESS")
    warm.lab.nursery.start_soon(warm.tier.run, warm.lab.parts.queue.next_change)
    await warm.lab.wait("step-1", survives="instance")
    assert warm.lab.bucket.get("step-1/_SUCCESS") == b"x"


@in_tier(flusher=False)
async def test_a_pointer_and_what_it_names_stay_until_the_next_one_can_come(warm: Warm) -> None:
    await save(warm, 1)
    await warm.write("latest", "step-1")
    await warm.settle()
    before = warm.shown()
    assert set(before) == {"step-1/a.bin", "step-1/_SUCCESS", "latest"}
    shard = "model-00001-of-00001.safetensors"
    index = "step-2/model.safetensors.index.json"
    await warm.write(index, f'{{"weight_map": {{"w": "{shard}"}}}}')
    await warm.write("latest", "step-2")
    for path in ("step-1/_SUCCESS", "step-1/a.bin", "step-1"):
        await warm.lab.remove(path)
    await warm.settle()
    assert warm.shown() == before
    await warm.write(f"step-2/{shard}")
    await warm.settle()
    assert set(warm.shown()) == {"latest", index, f"step-2/{shard}"}


@in_tier(flusher=False)
async def test_a_marker_goes_before_what_it_stands_for_is_replaced(warm: Warm) -> None:
    """The checkpoint is written anew; at no moment has its marker old and new shards beside it."""
    for name in ("a.bin", "b.bin", "_SUCCESS"):
        await warm.write(f"step-1/{name}", "old")
    await warm.settle()
    torn: list[str] = []
    show = warm.tier.directory.show

    def watched(name: str, path: str) -> int:
        if not path.endswith("_SUCCESS") and (warm.directory / "step-1/_SUCCESS").exists():
            torn.append(path)
        return show(name, path)

    warm.tier.directory.show = watched  # type: ignore[method-assign]
    await warm.lab.remove("step-1/_SUCCESS")
    for name in ("a.bin", "b.bin", "_SUCCESS"):
        await warm.write(f"step-1/{name}", "new")
    await warm.settle()
    assert torn == []
    assert set(warm.shown().values()) == {"new"}


@in_tier("tiers.warm_newest=1")
async def test_they_go_in_the_reverse_order_of_their_coming(warm: Warm) -> None:
    """A marker may tell of those before it, a pointer of all."""
    names = ["step-1/a.bin", "step-1/model.safetensors.index.json", "step-1/_SUCCESS"]
    remove, gone = warm.tier.directory.remove, []

    def removed(shown: Shown) -> bool:
        gone.append(shown.path)
        return remove(shown)

    warm.tier.directory.remove = removed  # type: ignore[method-assign]
    for name in [*names, "latest"]:
        await warm.write(name, "step-1" if name == "latest" else "{}")
    await warm.settle()
    for name in [*names, "latest"]:
        await warm.lab.remove(name)
    await warm.settle()
    assert gone == ["latest", *reversed(names)]
    gone.clear()
    await save(warm, 2)
    await warm.write("step-2/last.index.json", "{}")
    await save(warm, 3)
    await warm.settle()
    await warm.lab.wait()
    await warm.tiering.retain()
    assert gone[:2] == ["step-2/last.index.json", "step-2/_SUCCESS"]
