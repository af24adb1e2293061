"""Makes effects visible: content, attributes, links, markers, relocations, deletions.

Each method is one step that the order law has let go (`Flusher` asks it); uploads of parts alone
may run before.
"""

from __future__ import annotations

import contextlib
import json
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from cachefs.errors import NotFound, PreconditionFailed
from cachefs.failpoints import Change
from cachefs.flush.client import StoreClient
from cachefs.flush.committer import Committer, Moot
from cachefs.flush.comparing import Common, Comparison
from cachefs.flush.decay import Decay
from cachefs.flush.multipart import Multipart
from cachefs.flush.queue import EffectQueue
from cachefs.flush.receipt import Intent, UploadReceipt, confirm
from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow, EffectRow, GenerationRow, InodeRow, ObjectRow, UploadRow
from cachefs.model.extents import ExtentSet
from cachefs.model.plan import (
    S3_LIMITS,
    BaseObject,
    Limits,
    PartSource,
    UploadPlan,
    plan_assembly,
    plan_upload,
)
from cachefs.model.spans import joined
from cachefs.model.states import Event, GenState, advance
from cachefs.store.base import Body, FileRange


class Publisher(Committer):
    """Turns one effect into requests and records what came of it."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        client: StoreClient,
        path_of: Callable[[GenerationRow], str],
        *,
        part_size: int,
        single_put_max: int,
        owner: tuple[int, int],
        limits: Limits = S3_LIMITS,
    ) -> None:
        """`path_of`: where a generation's cache file is; sizes in bytes; `owner`: uid and gid that
        a directory without a marker has."""
        super().__init__(meta, queue, client)
        self._path_of = path_of
        self._part_size = part_size
        self._single_put_max = single_put_max
        self._owner = owner
        self._limits = limits
        self._void_bases: set[int] = set()
        """Generations whose base is no longer what the store has."""
        self.multipart = Multipart(meta, client)
        self.decay = Decay(meta, client, path_of)
        self.comparison = Comparison(meta, client, path_of)
        self.on_durable: Callable[[float], None] = lambda seconds: None
        """Called with the time from the close of a file to the store showing it."""
        self.on_assembled: Callable[[int], None] = lambda gen: None
        """Called with each generation that was put together from hidden objects: they may go."""

    # -- publish ------------------------------------------------------------------------------

    async def publish(self, effect: EffectRow) -> None:
        """Show an entry as it is now. Raises StoreError, OSError (cache file), Conflict."""
        dentry = self._meta.dentries.by_id(effect.dentry or 0)
        inode = self._inode_for(effect, dentry) if dentry is not None else None
        if dentry is None or inode is None:
            self._queue.cancel(effect)
        elif stat.S_ISDIR(inode.mode):
            await self._publish_directory(effect, dentry, inode)
        elif inode.target is not None:
            await self._put(effect, dentry, inode, inode.target, len(inode.target), None)
        elif effect.gen is not None:
            await self._publish_content(effect, dentry, inode, effect.gen)
        else:
            await self._publish_attributes(effect, dentry, inode)

    def _inode_for(self, effect: EffectRow, dentry: DentryRow) -> InodeRow | None:
        """The inode whose attributes an effect shows: for a file whose name a symlink took before
        it was shown, those of a plain file."""
        inode = self._meta.inodes.get(dentry.ino)
        is_of_file = effect.gen is not None or self._queue.is_passing_copy(effect)
        if inode is None or inode.target is None or not is_of_file:
            return inode
        return replace(inode, target=None, mode=stat.S_IFREG | 0o644)

    async def _publish_directory(
        self, effect: EffectRow, dentry: DentryRow, inode: InodeRow
    ) -> None:
        known = self._meta.objects.get(self._queue.key_of(dentry))
        outdated = known is not None and bool(known.etag) and self._changed(known, inode)
        if self.needs_no_marker(inode) and not outdated:
            self._queue.cancel(effect)
            return
        await self._put(effect, dentry, inode, b"", 0, None)

    def needs_no_marker(self, inode: InodeRow) -> bool:
        """A directory that has entries and nothing to say of its own exists by its entries."""
        plain = stat.S_IMODE(inode.mode) == 0o755 and (inode.uid, inode.gid) == self._owner
        return (
            plain
            and self._meta.dentries.has_children(inode.ino)
            and not self._meta.inodes.xattrs(inode.ino)
        )

    async def _publish_content(
        self, effect: EffectRow, dentry: DentryRow, inode: InodeRow, number: int
    ) -> None:
        gen = self._meta.generations.get(number)
        if gen is None:
            self._queue.cancel(effect)
            return
        twin = self._twin(inode, gen, dentry)
        if twin is not None:
            await self._copy(effect, dentry, inode, twin, gen.gen)
            return
        path = await self.decay.sound_path(gen)
        await self.compare(gen, self._queue.key_of(dentry))
        plan, base = self.plan(gen)
        if not plan.single:
            await self._publish_parts(effect, dentry, inode, gen, plan, base)
        elif plan.parts[0].source == PartSource.COPY and base is not None:
            await self._copy(effect, dentry, inode, base, gen.gen)
        else:
            await self._put(effect, dentry, inode, FileRange(path, 0, gen.size), gen.size, gen)

    def _twin(self, inode: InodeRow, gen: GenerationRow, dentry: DentryRow) -> ObjectRow | None:
        """An object that holds the generation's bytes already, under another name of the file."""
        holding = self._meta.objects.holding(inode.ino, gen.gen)
        return next((row for row in holding if row.dentry != dentry.id), None)

    async def compare(self, gen: GenerationRow, key: str) -> None:
        """Find out what of a generation `key` holds already, if nobody knows. CachefsError."""
        if self._meta.spans.has(gen.gen):
            return  # Not all of it is here to be compared.
        if gen.dirty is None or self._base(gen) is None:
            await self.comparison.run(gen, key)

    def plan(self, gen: GenerationRow) -> tuple[UploadPlan, ObjectRow | None]:
        """How to upload a generation, and the object that unchanged ranges come from."""
        if self._meta.spans.has(gen.gen):
            return self.plan_whole(gen), None
        base = self._base(gen)
        if base is not None and gen.dirty is not None:
            common: Common | None = Common(base, ExtentSet.unpack(gen.dirty))
        else:
            common = None if gen.gen in self._void_bases else self.comparison.of(gen)
        if common is None:
            return self.plan_whole(gen), None
        whole = BaseObject(common.base.size, common.base.etag)
        return self._plan(gen.size, common.dirty, whole), common.base

    def plan_whole(self, gen: GenerationRow) -> UploadPlan:
        """How to upload a generation when no object has anything of it, but for hidden ones."""
        copies = list(joined(self._meta.spans.of_gen(gen.gen)))
        if copies:
            return plan_assembly(gen.size, copies, self._limits, self._part_size)
        return self._plan(gen.size, None, None)

    def _plan(self, size: int, dirty: ExtentSet | None, base: BaseObject | None) -> UploadPlan:
        return plan_upload(
            size, dirty, base, self._limits,
            preferred_part=self._part_size, single_put_max=self._single_put_max,
        )  # fmt: skip

    def _base(self, gen: GenerationRow) -> ObjectRow | None:
        if gen.base is None or gen.gen in self._void_bases:
            return None
        return next(iter(self._meta.objects.holding(gen.ino, gen.base)), None)

    async def _publish_parts(
        self,
        effect: EffectRow,
        dentry: DentryRow,
        inode: InodeRow,
        gen: GenerationRow,
        plan: UploadPlan,
        base: ObjectRow | None,
    ) -> None:
        key = self._queue.key_of(dentry)
        upload = await self.send_parts(inode, gen, key, plan, base)
        if self._queue.key_of(dentry) != key:
            raise Moot
        metadata = json.loads(upload.meta or "{}")
        try:
            with self.multipart.completing(upload):
                info = await self._commit(
                    effect, dentry, gen, "complete_upload", Intent(upload.size, metadata),
                    upload_id=upload.upload_id, parts=self.multipart.receipts(upload),
                    size=upload.size,
                )  # fmt: skip
        except PreconditionFailed:
            info = await self._settle(key, gen.size, None, metadata)
        receipt, parts = confirm(key, info, gen.size), self.multipart.checksums(upload)
        self._record(effect, receipt, gen, metadata, parts, upload)
        self._refresh(dentry, metadata)

    def _refresh(self, dentry: DentryRow, metadata: dict[str, str]) -> None:
        """Attributes that changed while parts were sent are shown by an effect of their own."""
        current = self._meta.dentries.by_id(dentry.id)
        inode = self._meta.inodes.get(dentry.ino)
        if current is not None and inode is not None and self.attributes(inode) != metadata:
            with self._meta.transaction(Change.REFRESH):
                self._queue.publish(current, None, inode.size)

    async def send_parts(
        self,
        inode: InodeRow,
        gen: GenerationRow,
        key: str,
        plan: UploadPlan,
        base: ObjectRow | None,
    ) -> UploadRow:
        """Bring all parts of a generation to the store; nothing becomes visible."""
        if gen.state == GenState.SEALED:
            gen.state = advance(GenState.SEALED, Event.START)
            self._meta.generations.set_state(gen.gen, gen.state)
        path, attributes = await self.decay.sound_path(gen), self.attributes(inode)
        try:
            return await self.multipart.send_parts(gen, path, key, plan, attributes, base)
        except (PreconditionFailed, NotFound):
            # Only copying asks for one: another writer has replaced or deleted the base. Without it
            # all is sent, and what that writer did is met when the upload is to be completed.
            self._void_bases.add(gen.gen)
            plan, base = self.plan(gen)
            return await self.multipart.send_parts(gen, path, key, plan, attributes, base)

    async def _put(
        self,
        effect: EffectRow,
        dentry: DentryRow,
        inode: InodeRow,
        body: Body,
        size: int,
        gen: GenerationRow | None,
    ) -> None:
        key = self._queue.key_of(dentry)
        metadata = self.attributes(inode)
        try:
            info = await self._commit(
                effect, dentry, gen, "put", Intent(size, metadata), sends=size, body=body,
                metadata=metadata,
            )  # fmt: skip
        except PreconditionFailed:
            info = await self._settle(key, size, None, metadata)
        receipt = confirm(key, info, size)
        self._record(effect, receipt, gen, metadata, None, None)

    async def _copy(
        self,
        effect: EffectRow,
        dentry: DentryRow,
        inode: InodeRow,
        source: ObjectRow,
        gen: int | None,
    ) -> None:
        """Show `source`'s bytes under the entry's key, with the inode's attributes."""
        key = self._queue.key_of(dentry)
        metadata = self.attributes(inode)
        generation = self._meta.generations.get(gen) if gen is not None else None
        try:
            with self.copying(source):
                info = await self._commit(
                    effect, dentry, generation, "copy", Intent(source.size, metadata),
                    key_argument="dst",
                    src=source.key, metadata=metadata, if_source_match=source.etag,
                )  # fmt: skip
        except PreconditionFailed:
            info = await self._settle(key, source.size, source.crc64, metadata)
        receipt = confirm(key, info, source.size, source.crc64)
        if generation is None:
            held = self._meta.objects.gen_of(source)
            row = receipt.object_row(held, source.parts, json.dumps(metadata))
            self._queue.published(effect, row)
        else:
            self._record(effect, receipt, generation, metadata, source.parts, None)

    @contextlib.contextmanager
    def copying(self, source: ObjectRow) -> Iterator[None]:
        """What is to be copied may go, as is due, before the copy has its turn. Then the effect is
        looked at anew; a source that is missing for another reason is trouble."""
        try:
            yield
        except NotFound:
            known, deletion = (
                self._meta.objects.get(source.key),
                self._queue.unpublish_of(source.key),
            )
            if known is None or known.etag != source.etag:
                raise Moot from None
            if deletion is not None and self._queue.is_busy(deletion.id):
                raise Moot from None
            raise

    async def _publish_attributes(
        self, effect: EffectRow, dentry: DentryRow, inode: InodeRow
    ) -> None:
        key = self._queue.key_of(dentry)
        own = [row for row in self._meta.objects.of_dentry(dentry.id) if not row.stale]
        others = [row for row in self._meta.objects.of_inode(inode.ino) if not row.stale]
        source = next(iter(own or others), None)
        if source is not None and source.key == key and not self._changed(source, inode):
            self._queue.cancel(effect)
        elif not own and self._queue.has_content(dentry.id):
            self._queue.cancel(effect)  # Those bytes have a turn of their own.
        elif source is not None:
            await self._copy(effect, dentry, inode, source, None)
        elif inode.gen is not None:
            await self._publish_content(effect, dentry, inode, inode.gen)
        else:
            self._queue.cancel(effect)

    def _changed(self, known: ObjectRow, inode: InodeRow) -> bool:
        return known.meta is None or json.loads(known.meta) != self.attributes(inode)

    def _record(
        self,
        effect: EffectRow,
        receipt: UploadReceipt,
        gen: GenerationRow | None,
        metadata: dict[str, str],
        parts: str | None,
        upload: UploadRow | None,
    ) -> None:
        """One transaction: the object is there, the effect is done, the generation durable."""
        self._contradictions.pop(receipt.key, None)
        with self._meta.transaction(Change.RECORD):
            if upload is not None:
                self._meta.uploads.remove(upload.id)
            if gen is not None:
                self._mark(gen.gen, effect, receipt)
            row = receipt.object_row(gen.gen if gen else None, parts, json.dumps(metadata))
            self._queue.published(effect, row)

    def _mark(self, number: int, effect: EffectRow, receipt: UploadReceipt) -> None:
        """Durable, if this was the last name to be shown."""
        gen = self._meta.generations.get(number)
        if gen is None:
            return
        gen.crc64 = receipt.crc64
        self.decay.forget(number)
        self.comparison.forget(number)
        others = [each for each in self._queue.of_gen(number) if each.id != effect.id]
        if gen.state == GenState.UPLOADING and not others:
            gen.state, gen.error = advance(GenState.UPLOADING, Event.COMMIT), None
            self._meta.spans.release(gen, self.on_assembled)
            self.on_durable((time.time_ns() - (gen.sealed_ns or gen.created_ns)) / 1e9)
        self._meta.generations.save(gen)

    # -- relocate and unpublish ---------------------------------------------------------------

    async def relocate(self, effect: EffectRow) -> None:
        """Copy a renamed entry's object to its new key. The source goes by an effect of its own."""
        dentry = self._meta.dentries.by_id(effect.dentry or 0)
        inode = self._inode_for(effect, dentry) if dentry is not None else None
        if dentry is None or inode is None:
            self._queue.cancel(effect)
            return
        key = self._queue.key_of(dentry)
        if effect.key is not None:
            await self._copy_in_passing(effect, dentry, inode, effect.key, key)
            return
        objects = [row for row in self._meta.objects.of_dentry(dentry.id) if not row.stale]
        source = next((row for row in objects if row.key != key), None)
        if any(row.key == key for row in objects):
            self._queue.cancel(effect)
        elif source is None:
            await self.publish(effect)  # From the cache: its key has gone to another name.
        else:
            await self._relocate_from(effect, dentry, inode, source, key)

    async def _copy_in_passing(
        self, effect: EffectRow, dentry: DentryRow, inode: InodeRow, source: str, key: str
    ) -> None:
        known = self._meta.objects.get(source)
        if known is None or not known.etag:
            self._queue.cancel(effect)  # Another writer's doing: nobody can show it any more.
        else:
            await self._relocate_from(effect, dentry, inode, known, key)

    async def _relocate_from(
        self, effect: EffectRow, dentry: DentryRow, inode: InodeRow, source: ObjectRow, key: str
    ) -> None:
        if stat.S_ISDIR(inode.mode):
            await self._publish_directory(effect, dentry, inode)
            return
        # Attributes that were never read stay as the source has them.
        metadata = self.attributes(inode) if inode.attrs_known else None
        try:
            with self.copying(source):
                info = await self._commit(
                    effect, dentry, None, "copy", Intent(source.size, metadata or {}),
                    key_argument="dst", src=source.key, metadata=metadata,
                    if_source_match=source.etag,
                )  # fmt: skip
        except PreconditionFailed:
            info = await self._settle(key, source.size, source.crc64, metadata or {})
        receipt = confirm(key, info, source.size, source.crc64)
        meta = json.dumps(metadata) if metadata is not None else source.meta
        row = receipt.object_row(self._meta.objects.gen_of(source), source.parts, meta)
        self._queue.relocated(effect, source.key, row)

    async def unpublish(self, effects: list[EffectRow]) -> dict[int, Exception]:
        """Delete keys in one request; returns what failed, by effect.

        Its turn may take long to come: what is to be deleted then is decided then.
        """
        async with self._client.turn(""):
            keys = {effect.key or "": effect for effect in effects if self._is_met(effect)}
            if not keys:
                return {}
            with self._queue.doubts.deleting(keys):
                failures = await self._client.send("delete", keys=list(keys))
        failed = {self._client.relative(key): error for key, error in failures.items()}
        self._queue.unpublished(effect for key, effect in keys.items() if key not in failed)
        return {keys[key].id: error for key, error in failed.items() if key in keys}

    def _is_met(self, deletion: EffectRow) -> bool:
        """Whether a key is to be deleted now: nothing on its way there would come out after it. One
        that shows a name again is not to be deleted at all."""
        key = deletion.key or ""
        if self._queue.is_shown(key):
            self._queue.cancel(deletion)
        return key not in self._queue.under_way and self._queue.may_commit(deletion.id)
