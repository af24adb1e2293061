"""Effects: what the bucket will show, and the class that decides what each one waits for.

An effect is a publish, an unpublish or a relocation of a key. Its class comes from its name, its
size and whether the key is new; :mod:`cachefs.model.order` decides from it when the effect may
become visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cachefs.model import names


class EffectKind(StrEnum):
    """What happens to the key."""

    PUBLISH = "publish"
    UNPUBLISH = "unpublish"
    RELOCATE = "relocate"


class EffectClass(StrEnum):
    """What an effect waits for: nothing, earlier data, or everything earlier."""

    DATA = "data"
    SMALL = "small"
    BARRIER = "barrier"


class OrderMode(StrEnum):
    """``safe`` lets new data overtake; ``strict`` makes every effect a barrier."""

    SAFE = "safe"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class OrderRules:
    """Patterns (see :func:`cachefs.model.names.matches`) and sizes that classify effects."""

    mode: OrderMode | str = OrderMode.SAFE
    data_patterns: tuple[str, ...] = names.DATA_PATTERNS
    barrier_patterns: tuple[str, ...] = names.BARRIER_PATTERNS
    unordered_patterns: tuple[str, ...] = names.UNORDERED_PATTERNS
    temp_patterns: tuple[str, ...] = names.TEMP_PATTERNS
    data_min_size: int = 1 << 20
    """Bytes from which a new key counts as data whatever its name."""

    @property
    def strict(self) -> bool:
        return self.mode == OrderMode.STRICT


@dataclass(frozen=True, slots=True)
class Pending:
    """An effect that the bucket does not show yet.

    ``end`` is the number at which it became complete; what one rename moved may share its number,
    after that of the relocation that the same rename may cause. ``since <= end`` is the smallest
    end among the effects it superseded: it blocks others from ``since`` on, and waits itself by
    ``end``.
    """

    id: int
    kind: EffectKind
    klass: EffectClass
    since: int
    end: int
    key: str
    """Key, a relocation's target. That of a directory's marker may end in a slash."""
    old_key: str | None = None
    """A relocation's source."""
    is_dir: bool = False
    unordered: bool = False
    """Logs and the like: keeps its place on its own key, but no class rule applies to it."""
    held: bool = False
    """Bears a temporary name: not published, waits for nothing, blocks nothing."""
    blocked: bool = False
    """Refused or conflicted: cannot commit by itself, and goes on blocking those behind it."""
    size: int = 0
    """Bytes to publish; small barriers are never superseded while first in line on their key."""

    def __post_init__(self) -> None:
        if self.since > self.end:
            raise ValueError(f"effect {self.id}: since {self.since} is after end {self.end}")


def classify(
    rules: OrderRules,
    *,
    kind: EffectKind,
    name: str,
    path: str,
    size: int,
    new_key: bool,
    symlink: bool = False,
) -> EffectClass:
    """Return the class of an effect on ``path`` (below the mount), ``name`` its last part.

    ``new_key`` says that the bucket does not hold the key. Marker names win over data names.
    """
    if rules.strict or symlink or not new_key or kind is not EffectKind.PUBLISH:
        return EffectClass.BARRIER
    if names.matches(rules.barrier_patterns, path, name):
        return EffectClass.BARRIER
    if size >= rules.data_min_size or names.matches(rules.data_patterns, path, name):
        return EffectClass.DATA
    return EffectClass.SMALL


def is_unordered(rules: OrderRules, path: str) -> bool:
    """Return whether ``path`` takes no part in the order law (never so in strict mode)."""
    return not rules.strict and names.matches(rules.unordered_patterns, path)
