"""Names: keys of paths, their limits, and patterns that tell data, markers and temporaries.

Patterns: ``*`` and ``?`` and ``[...]`` do not cross a slash; ``**`` does. A pattern without a
slash is compared with the last component; one with a slash with the trailing components of the
path, or from the mount's root if it begins with a slash. ``XXXXXX`` stands for a suffix made by
``mkstemp``: six letters or digits, not all of them lower-case letters (so ``.file.backup`` is no
temporary, ``.file.x8Kq2c`` is), and ``<n>`` for a number.
"""

from __future__ import annotations

import errno
import functools
import re
from collections.abc import Iterator, Sequence

KEY_LIMIT = 1024
"""Bytes of UTF-8 that S3 allows in a key, prefix included."""

NAME_LIMIT = 255
"""Bytes in one component of a path, as in any Linux filesystem."""

RESERVED = ".cachefs/"
"""Where cachefs keeps its own objects below the store's prefix; hidden from the mount."""

PROBES = f"{RESERVED}probe-"
"""Beginning of the keys by which it is found out what a store supports."""

DATA_PATTERNS: tuple[str, ...] = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.distcp",
    "*.ckpt",
    "*.npz",
    "*.npy",
    "*.h5",
    "*.hdf5",
    "*.gguf",
    "*.msgpack",
    "*.nemo",
    "*.onnx",
    "*.tar",
    "*.data-?????-of-?????",
    "**/ocdbt.process_*/**",
    "**/d/????????????????????????????????",
    "*.zarr/**",
)
"""Bulk of a checkpoint: a new key of these waits for nothing."""

BARRIER_PATTERNS: tuple[str, ...] = (
    "*.index.json",
    "*.index",
    ".metadata",
    "latest*",
    "checkpoint",
    "trainer_state.json",
    "_SUCCESS",
    "commit_success.txt",
    "COMMIT_SUCCESS",
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "manifest.ocdbt",
    "metadata.json",
    "*.done",
    "*.complete",
    "DONE",
    "COMPLETE",
)
"""Markers: what a reader takes as leave to read the rest. They wait for everything before them."""

UNORDERED_PATTERNS: tuple[str, ...] = ("logs/**", "events.out.*", "wandb/**", "*.log")
"""Appended to for days; neither wait nor are waited for."""

TEMP_PATTERNS: tuple[str, ...] = (
    "*.tmp",
    "*.temp",
    "tmp-*",
    ".tmp*",
    "*.tmp.*",
    "*.tmp-*",
    "*.tmp[0-9a-f][0-9a-f][0-9a-f][0-9a-f]*",
    "*-<n>_temp",
    "*_temp_????????????????????????????????",
    "*-unfinished",
    "*.orbax-checkpoint-tmp*",
    "*.incomplete",
    "*.part",
    "*.partial",
    ".*.XXXXXX",
    ".~tmp~",
    ".*.sw[a-p]",
    ".nfs????????*",
)
"""Names that writers use until they rename; a temporary directory makes all below it temporary.

Orbax, NeMo, TensorFlow, Hugging Face hub, safetensors (Rust's tempfile), rsync, editors, NFS.
"""


def key_for(prefix: str, path: str, *, directory: bool = False) -> str:
    """Return the object's key for ``path`` (relative to the mount) under the store's ``prefix``.

    A directory's key ends in a slash; the root of the mount has the bare prefix.
    Raises OSError(ENAMETOOLONG) when S3 would refuse the key.
    """
    inner = path.strip("/")
    outer = prefix.strip("/")
    key = f"{outer}/{inner}" if outer and inner else outer + inner
    if directory and key:
        key += "/"
    if not key_fits(key):
        raise OSError(errno.ENAMETOOLONG, f"object key is longer than {KEY_LIMIT} bytes", path)
    return key


def key_fits(key: str, *, longest_below: int = 0) -> bool:
    """Return whether ``key`` is short enough.

    ``longest_below``: bytes of the longest path below a directory (its own slash not counted), so
    that the rename of a parent can be refused before anything moves.
    """
    below = longest_below + 1 if longest_below else 0
    return len(key.encode("utf-8")) + below <= KEY_LIMIT


def decode_name(raw: bytes) -> str:
    """Return a file name as text.

    Raises OSError: EILSEQ if it is not UTF-8 (keys are), ENAMETOOLONG over 255 bytes.
    """
    if len(raw) > NAME_LIMIT:
        raise OSError(errno.ENAMETOOLONG, f"name is longer than {NAME_LIMIT} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "name is not UTF-8, as object keys must be") from None


def above(path: str) -> Iterator[str]:
    """Yield every directory above ``path``, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


def is_reserved(path: str) -> bool:
    """Return whether ``path`` (relative to the mount) is in cachefs's own corner of the store."""
    inner = path.lstrip("/")
    return inner.startswith(RESERVED) or inner == RESERVED.rstrip("/")


def matches(patterns: Sequence[str], path: str, name: str | None = None) -> bool:
    """Return whether any pattern matches ``path`` (``name``: its last component, if at hand)."""
    inner = path.strip("/")
    base = name if name is not None else inner.rpartition("/")[2]
    on_name, on_path = _compiled(tuple(patterns))
    if on_name is not None and on_name.fullmatch(base):
        return True
    return on_path is not None and on_path.fullmatch("/" + inner) is not None


def is_temp(patterns: Sequence[str], path: str) -> bool:
    """Return whether ``path`` or any directory above it bears a temporary name."""
    inner = path.strip("/")
    on_name, on_path = _compiled(tuple(patterns))
    if on_name is not None and any(on_name.fullmatch(part) for part in inner.split("/")):
        return True
    if on_path is None:
        return False
    parts = inner.split("/")
    return any(on_path.fullmatch("/" + "/".join(parts[: i + 1])) for i in range(len(parts)))


def check_pattern(pattern: str) -> None:
    """Raise ValueError, saying what is wrong, for a pattern that cannot be compiled."""
    if not pattern.strip("/"):
        raise ValueError("empty pattern")
    try:
        re.compile(_translate(pattern))
    except re.error as problem:
        raise ValueError(f"bad pattern {pattern!r}: {problem}") from None


@functools.lru_cache(maxsize=64)
def _compiled(
    patterns: tuple[str, ...],
) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Join patterns into one expression for last components and one for whole paths."""
    simple = [_translate(p) for p in patterns if "/" not in p]
    pathed = [_translate_path(p) for p in patterns if "/" in p]
    return _alternatives(simple), _alternatives(pathed)


def _alternatives(expressions: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(expressions), re.DOTALL) if expressions else None


def _translate_path(pattern: str) -> str:
    """Expression for a path that begins with a slash."""
    anchored = pattern.startswith("/")
    body = _translate(pattern.strip("/"))
    return ("/" if anchored else "/(?:.*/)?") + body


_TOKENS = re.compile(r"\*\*/|/\*\*$|\*\*|\*|\?|XXXXXX|<n>|\[!?\]?[^\]]*\]|.", re.DOTALL)
_FIXED = {
    "**/": "(?:.*/)?",
    "/**": "/.+",
    "**": ".*",
    "*": "[^/]*",
    "?": "[^/]",
    "XXXXXX": "(?![a-z]{6})[A-Za-z0-9]{6}",
    "<n>": "[0-9]+",
}


def _translate(pattern: str) -> str:
    return "".join(_translate_token(token) for token in _TOKENS.findall(pattern))


def _translate_token(token: str) -> str:
    fixed = _FIXED.get(token)
    if fixed is not None:
        return fixed
    if len(token) > 1 and token.startswith("["):
        body = token[1:-1].replace("\\", r"\\")
        return f"[^/{body[1:]}]" if body.startswith("!") else f"[{body}]"
    return re.escape(token)
