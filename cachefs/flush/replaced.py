"""What was to be shown of a file when another one was renamed over it.

It gives way to its successor, as an earlier version of one file does. But a marker that waits for
it must not come out beside what was there before both: it waits for the successor instead where
that closes no circle (the successor is data, and free), and else the earlier version goes out
first. Such versions are effects of the entry that has the name now: content of another inode
(`gen`), or, if the bucket has it under another key, a copy from there (`key` of a relocation).
"""

from __future__ import annotations

from collections.abc import Iterable

from cachefs.flush.pending import PENDING
from cachefs.flush.pointers import Pointers
from cachefs.meta.rows import DentryRow, EffectRow
from cachefs.model.effects import EffectClass, EffectKind


class Replaced(Pointers):
    """Earlier versions among the pending effects."""

    def is_content(self, row: EffectRow) -> bool:
        """Whether an effect shows a generation's bytes."""
        return row.kind == EffectKind.PUBLISH and row.gen is not None

    def has_content(self, dentry: int) -> bool:
        """Whether an entry's content is still to be shown."""
        return any(self.is_content(row) for row in self.of_dentry(dentry))

    def _is_of_replaced(self, effect: EffectRow, dentry: DentryRow) -> bool:
        """Whether it shows what the name stood for before the entry had it."""
        if self.is_passing_copy(effect):
            return True
        if effect.gen is None:
            return False
        gen = self._meta.generations.get(effect.gen)  # None: given up while it was on its way.
        return gen is None or gen.ino != dentry.ino

    def _brings_content(self, dentry: DentryRow) -> bool:
        """Whether a generation of the entry's own file is still to be shown under its name."""
        effects = self.of_dentry(dentry.id)
        return any(e.gen is not None and not self._is_of_replaced(e, dentry) for e in effects)

    def _drop_replaced(self, moved: DentryRow) -> None:
        """Earlier versions under a name do not go along to another one."""
        for row in self.of_dentry(moved.id):
            if self._is_of_replaced(row, moved):
                self._drop(row)

    def _take_effects(self, moved: DentryRow, replaced: int, *, is_open: bool) -> None:
        """What was to be shown under the name gives way to what has it now, or goes out first.

        `is_open`: the content that has it now is still being written.
        """
        heir = self._newest(self.of_dentry(moved.id))
        given_up = []
        for row in self.of_dentry(replaced):
            if (heir or is_open) and self._goes_first(row, heir):
                self._hand_on(row, moved.id)
            elif row.kind != EffectKind.UNPUBLISH:
                if not self._order.get(row.id).held:
                    given_up.append(row)
                self._drop(row)
        if given_up:
            self._inherit(moved.id, min(row.since for row in given_up))

    def _newest(self, rows: Iterable[EffectRow]) -> EffectRow | None:
        """The last of an entry's effects that shows something under its name."""
        showing = [row for row in rows if row.kind != EffectKind.UNPUBLISH]
        return showing[-1] if showing else None

    def _hand_on(self, row: EffectRow, dentry: int) -> None:
        """An earlier version is from now on one of the entry that has the name now."""
        is_copy = row.kind == EffectKind.RELOCATE
        self._reassign(row, dentry, self._order.get(row.id).old_key if is_copy else None)

    def _goes_first(self, row: EffectRow, heir: EffectRow | None) -> bool:
        """Whether somebody may wait for a version of a file who cannot wait for the next instead.

        `heir` shows the next; None while that is still being written.
        """
        standing = self._order.get(row.id)
        is_copy = row.kind == EffectKind.RELOCATE and standing.old_key is not None
        if standing.held or not (is_copy or self.is_content(row)):
            return False
        if heir is None:
            return True
        if self._order.get(heir.id).held or self._is_free_data(heir, row.dentry):
            return False
        if row.id in self._busy:
            return True
        if EffectKind.RELOCATE in (row.kind, heir.kind):
            return self._order.is_awaited_before(row.id, heir.id)
        return not self._order.may_supersede(row.id, self._order.get(heir.id))

    def _is_free_data(self, heir: EffectRow, replaced: int | None) -> bool:
        """Whether others may wait for it instead: it waits for nothing but what it replaces."""
        blockers = self.blockers(heir.id) if heir.klass == EffectClass.DATA else None
        return blockers is not None and all(row.dentry == replaced for row in blockers)

    def _inherit(self, dentry: int, since: int) -> None:
        """Who waited for the entry that was replaced waits for the one in its place."""
        for row in self.of_dentry(dentry):
            if row.klass == EffectClass.DATA and row.kind != EffectKind.UNPUBLISH:
                row.since = min(row.since, since)
                self._update(row)

    def _is_outdated(self, effect: EffectRow, dentry: DentryRow) -> bool:
        """Whether what it showed has a successor under the same name, that is still to be shown."""
        others = (row for row in self.of_dentry(dentry.id) if row.id != effect.id)
        return self._is_of_replaced(effect, dentry) or any(
            self.is_content(row) and not self._is_of_replaced(row, dentry) for row in others
        )

    def _goes_on(self, effect: EffectRow) -> bool:
        """Whether an earlier version that came out is wanted under its entry's present name too."""
        if effect.id not in self.effects or effect.dentry is None:
            return False
        later = [row for row in self.of_dentry(effect.dentry) if row.id != effect.id]
        return self._goes_first(effect, self._newest(later))

    def _copy_in_passing(self, effect: EffectRow, source: str) -> None:
        """An earlier version came out under a name that its directory has no more: who waits for it
        under the new one goes on doing so."""
        now = self._clock()
        self._insert(
            EffectRow(
                0, EffectKind.RELOCATE, effect.dentry, None, source, effect.klass,
                effect.since, effect.end, PENDING, None, now, now,
            )
        )  # fmt: skip
