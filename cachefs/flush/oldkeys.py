"""Keys whose object is not, or not any more, what the entry of that name shows.

Such an object is deleted, unless the name is in use: then whoever has it overwrites the object, so
that a name which was never gone is never missing in the bucket. Until its bytes are where their
entry's name is now, an object is that entry's *source*, and nobody's to delete or to overwrite.
"""

from __future__ import annotations

from cachefs.flush.pending import PENDING, PendingEffects
from cachefs.meta.rows import DentryRow, EffectRow, ObjectRow
from cachefs.model.effects import EffectKind


class OldKeys(PendingEffects):
    """Who deletes or overwrites what a key holds."""

    def _is_source(self, key: str, dentry: int) -> bool:
        """Whether the key's object holds what another entry, renamed away from it, shows."""
        known = self._meta.objects.get(key)
        return (
            known is not None
            and known.dentry not in (None, dentry)
            and not known.stale
            and bool(known.etag)
        )

    def _adopt_object(self, key: str, dentry: int) -> None:
        known = self._meta.objects.get(key)
        if known is not None and known.dentry != dentry:
            known.dentry, known.stale = dentry, 1
            self._meta.objects.put(known)

    def let_go(self, key: str, going: int | None = None) -> None:
        """No entry needs a key's object any more. Call inside a transaction.

        `going`: an entry that is about to lose its name.
        """
        taker = self._taker(key, going)
        if taker is not None:
            self._adopt_object(key, taker.id)
            return
        known = self._meta.objects.get(key)
        if known is not None:
            known.dentry = None
            self._meta.objects.put(known)
        self._queue_unpublish(key, None, self._number_of_deletion(key))

    def _number_of_deletion(self, key: str, after: int = 0) -> int:
        """For a key that came to be shown when it was no entry's any more; `after`: what it is
        copied to has that number.

        If the name has become a directory since, or the directory a file, the key stands in the
        way: a store of files holds only one of them. Then it goes before what is to come.
        """
        first = min((each.end for each in self._order.in_conflict(key)), default=None)
        return self._number() if first is None else max(after, first - 1)

    def _taker(self, key: str, going: int | None = None) -> DentryRow | None:
        """The entry that has a name which was handed on to it: no deletion of it is pending."""
        entry = None if key in self._unpublish else self._entry_at(key)
        return entry if entry is not None and entry.id != going else None

    def _entry_at(self, key: str) -> DentryRow | None:
        """The entry of a key that is no directory's."""
        entry, parent = None, 1
        for name in key.split("/"):
            entry = self._meta.dentries.get(parent, name.encode())
            if entry is None:
                return None
            parent = entry.ino
        return entry if entry is not None and self.key_of(entry) == key else None

    def _queue_unpublish(self, key: str, dentry: int | None, number: int) -> None:
        now = self._clock()
        pending = self._unpublish.get(key)
        if pending in self._busy:
            return  # It goes right now; a second deletion would hit what comes after it.
        if pending is not None:
            self._drop(self.effects[pending])
        klass = self._classify(EffectKind.UNPUBLISH, key, 0)
        self._insert(
            EffectRow(
                0, EffectKind.UNPUBLISH, dentry, None, key, klass,
                number, number, PENDING, None, now, now,
            )
        )  # fmt: skip

    def _deleted(self, row: ObjectRow) -> None:
        """The bucket holds nothing under a key now; what is unanswered may come yet."""
        if row.intents is None:
            self._meta.objects.remove(row.key)
            return
        row.dentry, row.etag, row.mtime_ns = None, "", self._clock()
        self._meta.objects.put(row)

    def is_unused(self, key: str) -> bool:
        """Whether a key is no entry's, and no pending effect's."""
        return self._entry_at(key) is None and not self._order.on_key(key)

    def _cancel_unpublish(self, key: str, dentry: int) -> None:
        """The key's object belongs to a name again: its own, or one that will overwrite it."""
        pending = self._unpublish.get(key)
        if pending is not None and pending not in self._busy:
            if self._is_source(key, dentry):
                return  # Another entry's bytes, on their way to its new name.
            known = self._meta.objects.get(key)
            self._drop(self.effects[pending])
            if known is not None and known.dentry != dentry:
                self._adopt_object(key, dentry)
