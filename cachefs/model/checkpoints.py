"""Checkpoints by their names: which directory, file or group of files a path belongs to.

A path belongs to the outermost component that looks like a checkpoint's name. Failing that, some
files tell by their own name that the directory they are in is one.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import NamedTuple

from cachefs.model import names

CHECKPOINT_FORMS: tuple[tuple[str, str], ...] = (
    ("checkpoint-<n>", "Hugging Face"),
    ("global_step<n>", "DeepSpeed"),
    ("global_step_<n>", "DeepSpeed"),
    ("iter_<n>", "Megatron"),
    ("step-<n>", "torchtitan"),
    ("*.nemo", "NeMo"),
    ("*--*=*-step=<n>*", "NeMo"),
    ("*-step=<n>-consumed_samples=*", "NeMo"),
    ("*.ckpt", "Lightning"),
    ("epoch=<n>*", "Lightning"),
    ("step_<n>", "Orbax"),
    ("checkpoint_<n>", "Orbax"),
    ("ckpt-<n>", "TensorFlow"),
    ("ckpt_<n>", ""),
    ("step<n>", ""),
    ("step=<n>", ""),
    ("epoch_<n>", ""),
    ("epoch-<n>", ""),
)
"""Names of checkpoints as patterns, and who writes them ("" for several)."""

CHECKPOINT_PATTERNS: tuple[str, ...] = tuple(pattern for pattern, _ in CHECKPOINT_FORMS)

# prefix.index, prefix.meta and prefix.data-00000-of-00002 are one checkpoint; it has no directory.
_TENSORFLOW = re.compile(r"(?P<prefix>.+-\d+)\.(?:index|meta|data-\d{5}-of-\d{5})")
_ORBAX_INSIDE = (
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "_sharding",
    "manifest.ocdbt",
    "commit_success.txt",
    "ocdbt.process_*/**",
    "array_metadatas/**",
    "d/*",
)
_ORBAX_STEP = re.compile(r"(?:[^.]*_)?\d+")
_TELLTALES: tuple[tuple[str, str], ...] = (
    ("__*_*.distcp", "PyTorch DCP"),
    (".metadata", "PyTorch DCP"),
    ("mp_rank_*/*", "Megatron"),
    ("*-?????-of-?????.safetensors", "Hugging Face"),
    ("*.safetensors.index.json", "Hugging Face"),
    ("*-?????-of-?????.bin", "Hugging Face"),
    ("pytorch_model.bin.index.json", "Hugging Face"),
)
_ANY_TELLTALE = tuple(pattern for pattern, _ in _TELLTALES)
_STEP = re.compile(r"step[=_-]?(\d+)")
_NUMBER = re.compile(r"\d+")
_TENSORFLOW_POINTER = re.compile(r'model_checkpoint_path: *"([^"]+)"')

POINTER_MAX = 256
"""Bytes of a marker that are looked at for the name of a checkpoint."""


class Checkpoint(NamedTuple):
    """Where a path belongs."""

    root: str
    """Path of the directory or file, or the common prefix of a group of files."""
    framework: str
    """Who writes such; empty if unknown."""
    step: int | None
    """Training step, as far as the name tells."""


def find(path: str, patterns: Sequence[str] = CHECKPOINT_PATTERNS) -> Checkpoint | None:
    """Return the checkpoint that ``path`` (relative to the mount) is or is part of, if any.

    ``patterns`` name checkpoints by one component of their path, or by several with slashes. What
    bears a temporary name is not recognised until it is renamed.
    """
    inner = path.strip("/")
    root, framework = (
        _by_component(inner, patterns)
        or _by_tensorflow(inner)
        or _by_orbax(inner)
        or _by_telltale(inner)
        or ("", "")
    )
    if not root or names.is_temp(names.TEMP_PATTERNS, root):
        return None
    return Checkpoint(root, framework, step_of(root))


def checkpoint_root(path: str, patterns: Sequence[str] = CHECKPOINT_PATTERNS) -> str | None:
    """Return the root of the checkpoint that ``path`` is or is part of, if any."""
    found = find(path, patterns)
    return found.root if found is not None else None


def is_marker(name: str, patterns: Sequence[str] = names.BARRIER_PATTERNS) -> bool:
    """Return whether a file of that name tells readers that what it stands for may be read."""
    return names.matches(patterns, name)


def step_of(root: str) -> int | None:
    """Return the training step in the last component: after "step", else its last number."""
    name = root.rpartition("/")[2]
    step = _STEP.search(name)
    if step is not None:
        return int(step[1])
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def named_paths(pointer: str, text: str) -> tuple[str, ...]:
    """Return what a pointer may name by its path: what its text (a symlink's target) says seen from
    the pointer's directory, or what has the same last component beside it."""
    folder = posixpath.dirname(pointer)
    name = _name_in(text)
    if not name:
        return ()
    beside = posixpath.join(folder, posixpath.basename(name))
    path = posixpath.normpath(posixpath.join(folder, name))
    return (beside,) if path.startswith(("/", "..")) or path == "." else (path, beside)


def is_named_by(root: str, pointer: str, text: str) -> bool:
    """Return whether the file ``pointer`` with that content (a symlink: its target) names the
    checkpoint ``root``: by its path, its last component, or the step of one beside it."""
    if root in named_paths(pointer, text):
        return True
    name = _name_in(text)
    beside = posixpath.dirname(root) == posixpath.dirname(pointer)
    return beside and name.isdecimal() and step_of(root) == int(name)


def _name_in(text: str) -> str:
    found = _TENSORFLOW_POINTER.search(text)
    return (found[1] if found else text.strip()).rstrip("/")


_Found = tuple[str, str] | None


def _by_component(path: str, patterns: Sequence[str]) -> _Found:
    parts = path.split("/")
    for depth, part in enumerate(parts, 1):
        above = "/".join(parts[:depth])
        if names.matches(patterns, above, part):
            return above, _framework(part)
    return None


def _framework(name: str) -> str:
    for pattern, framework in CHECKPOINT_FORMS:
        if names.matches((pattern,), name, name):
            return framework
    return ""


def _by_tensorflow(path: str) -> _Found:
    above, slash, name = path.rpartition("/")
    match = _TENSORFLOW.fullmatch(name)
    return (above + slash + match["prefix"], "TensorFlow") if match else None


def _by_orbax(path: str) -> _Found:
    if not names.matches(_ORBAX_INSIDE, path):
        return None
    parts = path.split("/")[:-1]
    for depth in range(len(parts), 0, -1):
        if _ORBAX_STEP.fullmatch(parts[depth - 1]):
            return "/".join(parts[:depth]), "Orbax"
    return None


def _by_telltale(path: str) -> _Found:
    if not names.matches(_ANY_TELLTALE, path):
        return None
    for pattern, framework in _TELLTALES:
        if names.matches((pattern,), path):
            return "/".join(path.split("/")[: -1 - pattern.count("/")]), framework
    return None
