"""The demonstration's checkpoint is what a training framework would read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from cachefs.demo import checkpoint as checkpoints
from cachefs.demo.checkpoint import MIB, Checkpoint


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    return checkpoints.build(8 * MIB)


def test_size_is_about_what_was_asked_for(small: Checkpoint) -> None:
    assert small.size == pytest.approx(8 * MIB, rel=0.02)


def test_same_arguments_give_the_same_bytes(small: Checkpoint) -> None:
    again = checkpoints.build(8 * MIB)
    assert [f.sha256 for f in again.files] == [f.sha256 for f in small.files]


def test_saved_files_hold_the_content_in_order(small: Checkpoint, tmp_path: Path) -> None:
    written: list[int] = []
    checkpoints.save(small, tmp_path, written.append)
    assert sum(written) == small.size
    assert max(written) <= checkpoints.WRITE_SIZE
    found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {file.path for file in small.files}
    for file in small.files:
        assert (tmp_path / file.path).read_bytes() == b"".join(file.buffers)
    assert small.files[-1].path == checkpoints.POINTER
    assert (tmp_path / checkpoints.POINTER).read_text() == small.name


def test_shards_are_safetensors_and_the_index_finds_every_tensor(
    small: Checkpoint, tmp_path: Path
) -> None:
    checkpoints.save(small, tmp_path, lambda _: None)
    folder = tmp_path / small.name
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = 0
    for name, shard in index["weight_map"].items():
        with safe_open(folder / shard, framework="np") as file:
            piece = file.get_slice(name)
            assert piece.get_dtype() == "BF16"
            rows, *rest = piece.get_shape()
            total += 2 * rows * (rest[0] if rest else 1)
    assert total == index["metadata"]["total_size"]
    assert len(set(index["weight_map"].values())) == checkpoints.SHARDS
