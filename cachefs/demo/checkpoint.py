"""A realistic sharded checkpoint, made without a training framework.

It looks like what a trainer leaves: a directory `checkpoint-<step>` with the weights of a small
transformer in bfloat16 shards (safetensors), the index JSON that says which tensor lies in which
shard, 8-bit optimizer state, the trainer's state, and beside the directory a pointer `latest`.
Content is pseudo-random, so nothing on the way can shrink it, and the same for the same arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20
SHARDS = 4
"""Files that the weights, and again the optimizer's state, are split into."""
WRITE_SIZE = 4 * MIB
"""Largest single write() of `save`, in bytes."""
POINTER = "latest"
MARKERS = (".index.json", "trainer_state.json", POINTER)
"""Ends of the names whose presence tells a reader that what was saved before is usable."""

_BYTES = {"BF16": 2, "I8": 1}


class Tensor(NamedTuple):
    """One tensor's place in a safetensors file; `data` is row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class CheckpointFile:
    """A file to be saved; `path` is relative to the directory that holds all checkpoints."""

    path: str
    buffers: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self.buffers))

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the content."""
        digest = hashlib.sha256()
        for buffer in self.buffers:
            digest.update(buffer)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All files of a checkpoint in the order a trainer writes them; the pointer is the last."""

    name: str
    files: tuple[CheckpointFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def build(size: int = 256 * MIB, step: int = 1000) -> Checkpoint:
    """A checkpoint of about `size` bytes (never less than one layer), in memory."""
    name = f"checkpoint-{step}"
    weights = list(_split(_weights(size // 2), SHARDS))
    moments = [[_moment(tensor) for tensor in shard] for shard in weights]
    files = [_json("config.json", _config(weights))]
    names = [f"model-{n:05}-of-{SHARDS:05}.safetensors" for n in range(1, SHARDS + 1)]
    files += [_safetensors(*pair) for pair in zip(names, weights, strict=True)]
    files.append(_json("model.safetensors.index.json", _index(names, weights)))
    ranks = [f"optimizer-{n:05}-of-{SHARDS:05}.safetensors" for n in range(1, SHARDS + 1)]
    files += [_safetensors(*pair) for pair in zip(ranks, moments, strict=True)]
    files.append(_json("scheduler.json", {"last_epoch": step, "base_lrs": [3e-4]}))
    files.append(_json("trainer_state.json", _trainer_state(step)))
    inside = [CheckpointFile(f"{name}/{file.path}", file.buffers) for file in files]
    return Checkpoint(name, (*inside, CheckpointFile(POINTER, (name.encode(),))))


def save(checkpoint: Checkpoint, root: Path, on_bytes: Callable[[int], object]) -> None:
    """Write all files below `root` as a trainer does, the pointer by rename.

    `on_bytes` is told the length of every write. Raises OSError.
    """
    (root / checkpoint.name).mkdir(parents=True)
    for file in checkpoint.files:
        target = root / file.path
        is_pointer = file.path == POINTER
        written = target.with_name(f"{POINTER}.tmp") if is_pointer else target
        with open(written, "wb", buffering=0) as output:
            for piece in _pieces(file.buffers):
                output.write(piece)
                on_bytes(len(piece))
        if is_pointer:
            os.replace(written, target)


def _pieces(buffers: tuple[bytes, ...]) -> Iterator[memoryview]:
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), WRITE_SIZE):
            yield view[start : start + WRITE_SIZE]


def _weights(size: int) -> list[Tensor]:
    """About `size` bytes of a transformer: an embedding and as many layers as it takes."""
    hidden = 1024 if size >= 64 * MIB else 256
    inner = hidden * 11 // 4
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
    }
    layer_bytes = sum(_length("BF16", shape) for shape in layer.values())
    layers = max(1, size // layer_bytes)
    rows = max(64, (size - layers * layer_bytes) // (2 * hidden))  # the vocabulary takes the rest
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, hidden)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{part}.weight": shape for part, shape in layer.items()}
    return [_tensor(name, "BF16", shape) for name, shape in shapes.items()]


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, dtype, shape, random.Random(name).randbytes(_length(dtype, shape)))


def _moment(weight: Tensor) -> Tensor:
    """Both Adam moments of a weight, quantized to eight bits: as many bytes as the weight."""
    return _tensor(f"state.{weight.name}", "I8", (2, *weight.shape))


def _length(dtype: str, shape: tuple[int, ...]) -> int:
    length = _BYTES[dtype]
    for extent in shape:
        length *= extent
    return length


def _split(tensors: list[Tensor], shards: int) -> Iterator[list[Tensor]]:
    """Whole tensors, in order, in `shards` parts of about the same size."""
    total = sum(len(tensor.data) for tensor in tensors)
    end, taken, seen = 0, 0, 0
    for shard in range(1, shards + 1):
        while end < len(tensors) and seen + len(tensors[end].data) // 2 < total * shard / shards:
            seen += len(tensors[end].data)
            end += 1
        yield tensors[taken:end]
        taken = end


def _safetensors(path: str, tensors: list[Tensor]) -> CheckpointFile:
    """Format: header length (8 bytes), JSON header padded to 8 bytes, the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + len(tensor.data)
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return CheckpointFile(
        path, (len(text).to_bytes(8, "little") + text, *(tensor.data for tensor in tensors))
    )


def _json(path: str, value: object) -> CheckpointFile:
    return CheckpointFile(path, (json.dumps(value, indent=2).encode() + b"\n",))


def _index(names: list[str], shards: list[list[Tensor]]) -> dict[str, object]:
    placed = [(tensor, name) for name, shard in zip(names, shards, strict=True) for tensor in shard]
    return {
        "metadata": {"total_size": sum(len(tensor.data) for tensor, _ in placed)},
        "weight_map": {tensor.name: name for tensor, name in placed},
    }


def _config(shards: list[list[Tensor]]) -> dict[str, object]:
    vocabulary, hidden = shards[0][0].shape
    layers = {tensor.name.split(".")[2] for shard in shards for tensor in shard} - {"weight"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": len(layers),
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
    }


def _trainer_state(step: int) -> dict[str, object]:
    history = [{"step": at, "loss": round(2 + 8 / (1 + at / 50), 4)} for at in range(0, step, 10)]
    return {"global_step": step, "max_steps": 10 * step, "log_history": history}
