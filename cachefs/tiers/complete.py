"""Whether all that a sign tells of is in the warm tier: a marker, a pointer, or a symlink.

The law is the bucket's: nobody who reads the tier sees a torn checkpoint. A sign waits

 - in a checkpoint: for all files of that checkpoint; an index file also for the shards it names;
 - elsewhere: for the checkpoint that its text (a symlink: its target) names, whole; if it names
   none, until nothing beside or below it that is part of no checkpoint is known to lack its copy;
 - where several nodes save together: until the store shows the sign, too, and the tier has what the
   others have told there that they saved. Only there is it known that they have done their part.

Files with temporary names and logs are waited for by nobody, nor is a file that is being written
for the first time: it has no end yet. What another node or an earlier cache has put into the tier
is known by its size. Nothing here awaits or looks at the directory: the caller does that (`Needs`).
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow
from cachefs.meta.warm import MemberRow, WarmState
from cachefs.model import checkpoints, names

_ROOT = 1


@dataclass(frozen=True, slots=True)
class Sign:
    """A marker, pointer or symlink that is to be shown. `gen` 0: a symlink."""

    dentry: int
    path: str
    gen: int
    text: str
    """Where a symlink leads, or the beginning of a file that may be a pointer."""
    shards: frozenset[str] = frozenset()
    """Paths that an index file names."""

    @property
    def is_link(self) -> bool:
        """Whether it is a symlink."""
        return self.gen == 0


@dataclass(slots=True)
class Needs:
    """What a sign waits for still."""

    lacking: list[str] = field(default_factory=list)
    """Paths whose content has no copy."""
    foreign: list[tuple[str, int | None]] = field(default_factory=list)
    """(path, size if known) of what others may have put there: to be looked for."""


class Complete:
    """Answers from what the database knows. `is_unordered(path)`: a log or the like."""

    def __init__(
        self,
        meta: Meta,
        *,
        patterns: Sequence[str],
        markers: Sequence[str],
        temps: Sequence[str],
        is_unordered: Callable[[str], bool],
        nodes: int = 1,
    ) -> None:
        self._meta = meta
        self._patterns = patterns
        self._markers = markers
        self._temps = temps
        self._is_unordered = is_unordered
        self.waits_for_store = nodes > 1

    def root(self, path: str) -> str | None:
        """The checkpoint that a path is part of, by its name alone."""
        return checkpoints.checkpoint_root(path, self._patterns)

    def roots(self, sign: Sign) -> list[str]:
        """The checkpoints that a sign tells of."""
        root = self.root_of_sign(sign.path)
        return [root] if root is not None else self._named(sign)

    def root_of_sign(self, path: str) -> str | None:
        """The same of a marker, or another file whose own name does not tell: those beside it may
        tell that their directory is a checkpoint."""
        folder = posixpath.dirname(path)
        told = self.root(path)
        if told is None and any(self.root(each) == folder for each in self._beside(folder)):
            return folder
        return told

    def is_sign(self, path: str, *, is_link: bool) -> bool:
        """Whether it tells of others, and so waits for them."""
        return is_link or names.matches(self._markers, path)

    def is_temp(self, path: str) -> bool:
        """Whether a path is to be renamed before anybody is to read it."""
        return names.is_temp(self._temps, path)

    def members(self, root: str) -> list[MemberRow]:
        """All files and symlinks of a checkpoint that are known here, in whatever tier."""
        return self._of(root)

    def is_whole(self, root: str, paths: Sequence[str]) -> bool:
        """Whether files at these paths make up a checkpoint that its saver has finished."""
        if list(paths) == [root]:
            return True
        return any(self.is_sign(path, is_link=False) for path in paths)

    def is_finished(self, root: str) -> bool:
        """Whether a checkpoint is whole, and none of its files is being written."""
        members = self._of(root)
        paths = [each.path for each in members]
        return (
            self.is_whole(root, paths)
            and not any(map(self.is_temp, paths))
            and not any(each.is_open for each in members)
        )

    def lacks(self, root: str) -> bool:
        """Whether the tier is known to lack a file of a checkpoint, or has it in another place.
        What retention has removed does not count."""
        found = Needs()
        for member in self._of(root):
            if member.state != WarmState.RELEASED and not self._is_free(member.path):
                self._look_at(member, found)
        return bool(found.lacking)

    def needs(self, sign: Sign, unshown: Container[int]) -> Needs:
        """What it waits for; `unshown`: names that have their turn after it, or are its own."""
        found = Needs()
        if self.waits_for_store and not self._is_in_store(sign):
            found.lacking.append(sign.path)
        members = {each.dentry: each for each in self._told_of(sign, found)}
        for path in sign.shards:
            entry = self._entry(path)
            if entry is None:
                found.foreign.append((path, None))
            else:
                members.update((each.dentry, each) for each in self._at(path, entry))
        for member in members.values():
            if member.dentry not in unshown and not self._is_free(member.path):
                self._look_at(member, found)
        return found

    def _is_in_store(self, sign: Sign) -> bool:
        return any(
            row.key == sign.path and row.etag and not row.stale
            for row in self._meta.objects.of_dentry(sign.dentry)
            if sign.is_link or row.gen == sign.gen
        )

    def _is_free(self, path: str) -> bool:
        return self.is_temp(path) or self._is_unordered(path)

    # -- what it tells of ---------------------------------------------------------------------

    def _told_of(self, sign: Sign, found: Needs) -> Iterator[MemberRow]:
        if sign.is_link:
            yield from self._linked(sign, found)
        if not names.matches(self._markers, sign.path):
            return
        root = self.root_of_sign(sign.path)
        if root is not None:
            yield from self._of(root)
        elif roots := self._named(sign):
            yield from self._of_any(roots, found)
        elif not sign.is_link:
            found.lacking += self._lacking_below(posixpath.dirname(sign.path))

    def _linked(self, sign: Sign, found: Needs) -> Iterator[MemberRow]:
        to = checkpoints.named_paths(sign.path, sign.text)[:1]
        entry = self._entry(to[0]) if to else None
        if entry is None or (self.root(to[0]) is None and self._is_directory(entry)):
            if roots := self._named(sign):
                yield from self._of_any(roots, found)
            elif entry is not None:
                found.lacking += self._lacking_below(to[0])
            return
        yield from self._at(to[0], entry)

    def _named(self, sign: Sign) -> list[str]:
        """Checkpoints that a pointer may mean, whether they are there or not."""
        paths = checkpoints.named_paths(sign.path, sign.text)
        roots = [path for path in paths if self.root(path) == path]
        return roots or self._with_that_step(sign)

    def _with_that_step(self, sign: Sign) -> list[str]:
        if not sign.text.strip().isdecimal():
            return []
        folder = posixpath.dirname(sign.path)
        inside = {self.root(path) for path in self._beside(folder)} - {None}
        return [r for r in inside if r and checkpoints.is_named_by(r, sign.path, sign.text)]

    def _of_any(self, roots: Iterable[str], found: Needs) -> list[MemberRow]:
        """Of the one that is there; a name of what is nowhere is not shown."""
        members = [member for root in dict.fromkeys(roots) for member in self._of(root)]
        if not members:
            found.lacking += roots
        return members

    def _lacking_below(self, folder: str) -> list[str]:
        below = self._meta.warm.lacking_below(folder)
        return [path for path in below if self.root(path) is None and not self._is_free(path)]

    # -- members ------------------------------------------------------------------------------

    def _of(self, root: str) -> list[MemberRow]:
        """All files of a checkpoint."""
        entry = self._entry(root)
        if entry is not None:
            return self._at(root, entry)
        members: list[MemberRow] = []  # A group of files that share the beginning of their names.
        for path in self._beside(posixpath.dirname(root)):
            if self.root(path) == root and (entry := self._entry(path)) is not None:
                members += self._at(path, entry)
        return members

    def _at(self, path: str, entry: DentryRow) -> list[MemberRow]:
        member = self._meta.warm.member(entry.id, path)
        return [member] if member else self._meta.warm.members(entry.ino, path)

    def _beside(self, folder: str) -> Iterator[str]:
        entry = self._entry(folder) if folder else None
        if folder and entry is None:
            return
        for name in self._meta.dentries.names(entry.ino if entry is not None else _ROOT):
            yield posixpath.join(folder, os.fsdecode(name))

    def _entry(self, path: str) -> DentryRow | None:
        entry: DentryRow | None = None
        for name in os.fsencode(path).split(b"/"):
            entry = self._meta.dentries.get(_ROOT if entry is None else entry.ino, name)
            if entry is None:
                break
        return entry

    def _is_directory(self, entry: DentryRow) -> bool:
        return self._meta.warm.member(entry.id, "") is None

    def _look_at(self, member: MemberRow, found: Needs) -> None:
        is_there = member.state == WarmState.HELD and member.copied_path == member.path
        if is_there and self._is_current(member):
            return
        is_new = member.state is None
        if is_new and member.is_open and not self._had_content(member):
            return
        if is_new and not (member.is_open or member.is_ours or member.is_link):
            found.foreign.append((member.path, member.size))
        else:
            found.lacking.append(member.path)

    def _is_current(self, member: MemberRow) -> bool:
        """Whether a copy has the content that the name has; while that is being written, the one
        before."""
        if member.is_open or member.copied_gen == (0 if member.is_link else member.gen):
            return True
        objects = self._meta.objects.of_dentry(member.dentry)
        return member.gen is None and any(each.gen == member.copied_gen for each in objects)

    def _had_content(self, member: MemberRow) -> bool:
        """Whether a file that is being written has been complete before."""
        rows = self._meta.generations.of_inode(member.ino)
        objects = self._meta.objects.of_dentry(member.dentry)
        return any(row.sealed_ns for row in rows) or any(each.etag for each in objects)
