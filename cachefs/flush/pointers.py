"""Pointers that are rewritten while what they named is deleted: rotation of checkpoints.

A marker that is rewritten has its older versions pending as well, so that it never starves. That
must not show one that names a checkpoint which was deleted before it was whole.
"""

from __future__ import annotations

from cachefs.flush.oldkeys import OldKeys
from cachefs.flush.pending import in_order
from cachefs.meta.rows import EffectRow
from cachefs.model.effects import EffectKind
from cachefs.model.names import matches

_Versions = tuple[list[EffectRow], EffectRow]
"""Older versions of a marker, and the newest one."""


class Pointers(OldKeys):
    """The versions of markers among the pending effects."""

    def drop_stale(self, since: int) -> None:
        """Data from `since` on was cancelled that earlier versions of a pointer may stand for.

        One that waited for what was cancelled would come out as the name of a checkpoint that was
        deleted before it was whole: its newest version alone is wanted.
        """
        for stale, newest in self._droppable(self._outdated(since)):
            self._postpone_deletions(stale[0].end, newest.end)
            for row in stale:
                self._drop(row)

    def can_drop_stale(self, since: int) -> bool:
        """Whether `drop_stale` would leave none of them."""
        outdated = self._outdated(since)
        return len(self._droppable(outdated)) == len(outdated)

    def _droppable(self, outdated: list[_Versions]) -> list[_Versions]:
        """Those that can go together: each that has to stay may need others to stay as well."""
        while True:
            going = {row.id for stale, _ in outdated for row in stale}
            free = [each for each in outdated if self._is_free(each[0][0], each[1], going)]
            if len(free) == len(outdated):
                return free
            outdated = free

    def _outdated(self, since: int) -> list[_Versions]:
        """(older versions, the newest one) of each marker that has older ones from `since` on."""
        found = []
        for dentry in self._stacked:
            versions = self._versions(dentry)
            stale = [row for row in versions[:-1] if row.end > since and row.id not in self._busy]
            if stale:
                found.append((stale, versions[-1]))
        return found

    def _is_free(self, stale: EffectRow, newest: EffectRow, going: set[int]) -> bool:
        """Whether it is a pointer, and no other marker that is to be shown between two of its
        versions stands for the former: one in its directory, or above, that is not `going`."""
        key = self._order.get(newest.id).key
        between = self._order.barriers_between(stale.end, newest.end)
        return self._is_marker(key) and not any(
            self._is_marker(each.key)
            and key.startswith(each.key[: each.key.rfind("/") + 1])
            and each.id not in going
            and self.effects[each.id].dentry != newest.dentry
            for each in between
        )

    def _versions(self, dentry: int) -> list[EffectRow]:
        return [row for row in self.of_dentry(dentry) if row.kind == EffectKind.PUBLISH]

    def _is_marker(self, key: str) -> bool:
        return matches(self._rules.barrier_patterns, key)

    def _postpone_deletions(self, after: int, before: int) -> None:
        """Deletions that ended in between waited for a version of a pointer that goes: until the
        newest one is shown, the bucket's may still name what they delete."""
        rows = (self.effects[effect] for effect in self._unpublish.values())
        between = [row for row in rows if after < row.end < before and row.id not in self._busy]
        for row in sorted(between, key=in_order):
            if not self._order.is_awaited_by_key(row.id):
                row.end = row.since = self._number()
                self._update(row)
