"""What becomes of a version that lost its key to another writer: it is kept beside it."""

from __future__ import annotations

from cachefs.flush.client import StoreClient
from cachefs.flush.publisher import Publisher
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow, GenerationRow
from cachefs.store.base import FileRange


class Beside:
    """Uploads generations beside the objects that other writers made."""

    def __init__(
        self, meta: Meta, queue: EffectQueue, client: StoreClient, publisher: Publisher
    ) -> None:
        self._meta = meta
        self._queue = queue
        self._client = client
        self._publisher = publisher

    async def keep(self, effect: EffectRow, suffix: str) -> str | None:
        """Upload an effect's generation under its key with `suffix`.

        Returns the key; None if there are no bytes to keep. Raises StoreError, OSError.
        """
        gen = self._meta.generations.get(effect.gen) if effect.gen is not None else None
        dentry = self._meta.dentries.by_id(effect.dentry or 0)
        inode = self._meta.inodes.get(dentry.ino) if dentry is not None else None
        if gen is None or dentry is None or inode is None:
            return None
        key, metadata = self._queue.key_of(dentry) + suffix, self._publisher.attributes(inode)
        await self._upload(gen, key, metadata)
        return key

    async def _upload(self, gen: GenerationRow, key: str, metadata: dict[str, str]) -> None:
        path = await self._publisher.decay.sound_path(gen)
        plan = self._publisher.plan_whole(gen)
        if plan.single:
            await self._client.patiently(
                "put", sends=gen.size, key=key, body=FileRange(path, 0, gen.size),
                metadata=metadata, if_none_match=True,
            )  # fmt: skip
            return
        multipart = self._publisher.multipart
        upload = await multipart.send_parts(gen, path, key, plan, metadata, None)
        await self._client.patiently(
            "complete_upload", key=key, upload_id=upload.upload_id, size=gen.size,
            parts=multipart.receipts(upload), if_none_match=True,
        )  # fmt: skip
        self._meta.uploads.remove(upload.id)
