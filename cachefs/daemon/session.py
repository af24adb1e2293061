"""The session with the store: is it there, is it the right one, and reading from it.

A store's identity is the object ``.cachefs/id`` under its prefix, written once. A cache remembers
it, so that dirty data never goes to another store that happens to have the same name. Where that
object may not be written, URL and endpoint are the identity.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress

import structlog
import trio

from cachefs.config import Settings
from cachefs.errors import MountError, NotFound, PreconditionFailed, Refused, Retry, StoreError
from cachefs.flush import remains
from cachefs.flush.client import StoreClient
from cachefs.meta import Meta
from cachefs.model.names import RESERVED
from cachefs.store.base import Capabilities, Listing, ObjectInfo
from cachefs.vfs.remote import RemoteObject

log = structlog.get_logger("cachefs.store")

_ID_KEY = f"{RESERVED}id"
_PROBE_TIMEOUT = 20.0
_LOOK = 3.0
"""Seconds between looks at a store that did not answer."""
_NOT_ASKED = "not asked yet"


class WrongStore(MountError):
    """Another store answers under the name of the one that the cache belongs to."""


class StoreSession:
    """What the daemon knows of its store."""

    def __init__(self, meta: Meta, client: StoreClient, settings: Settings, owner: str) -> None:
        """`owner`: the name of the cache, for what a probe leaves if it is interrupted."""
        self._meta = meta
        self._owner = owner
        self._client = client
        self._settings = settings
        self._identity: str | None = None
        self.capabilities: Capabilities | None = None
        self.problem: str | None = _NOT_ASKED
        """Why the store cannot be used, None while it can."""
        self.usable = trio.Event()
        """Set once the store is known to be the right one."""

    @property
    def is_degraded(self) -> bool:
        """Whether the store was out of reach, or not usable, when it was last asked something."""
        return self.problem not in (None, _NOT_ASKED) or self._client.is_unreachable

    @property
    def is_fresh(self) -> bool:
        """True for a cache that belongs to no store yet."""
        return self._meta.setting("store_url") is None

    def check_remembered(self) -> None:
        """A cache serves the store it was made for. Raises MountError."""
        url = self._meta.setting("store_url")
        if url is not None and url != self._settings.store.url:
            raise MountError(
                f"the cache directory belongs to {url}, not to {self._settings.store.url}",
                hint="give another --cache-dir, or mount the store it belongs to",
            )

    async def open(self) -> None:
        """Reach the store and make sure it is ours. Raises StoreError, MountError or WrongStore.

        A new cache does not belong to it, and nothing is sent to it, before `remember`.
        """
        self._client.barred = None
        with trio.move_on_after(_PROBE_TIMEOUT) as scope:
            self.capabilities = await self._client.call("probe", owner=self._owner)
            await self._check_identity()
        if scope.cancelled_caught:
            raise MountError(
                f"{self._settings.store.url} did not answer within {_PROBE_TIMEOUT:g} s",
                hint="check the endpoint and the network",
            )
        self.problem = None

    async def _check_identity(self) -> None:
        known = self._meta.setting("store_id")
        found = await self._read_identity()
        if found is None:
            found = await self._write_identity(known)
        if known is not None and found is not None and known != found:
            self._client.barred = (
                f"{self._settings.store.url} is not the store this cache belongs to "
                f"(identity {found}, expected {known})"
            )
            raise WrongStore(
                self._client.barred,
                hint="check the endpoint or give another --cache-dir; dirty data stays cached",
            )
        self._identity = found

    async def _read_identity(self) -> str | None:
        try:
            data: bytes = await self._client.call("get_bytes", key=_ID_KEY)
        except NotFound:
            return None
        return data[:64].decode("ascii", "replace").strip()

    async def _write_identity(self, known: str | None) -> str | None:
        identity = known or str(uuid.uuid4())
        try:
            await self._client.call(
                "put", key=_ID_KEY, body=identity.encode(), metadata={}, if_none_match=True
            )
        except PreconditionFailed:
            return await self._read_identity()
        except Refused as error:
            log.info("no right to write the store's identity", reason=str(error))
            return None
        return identity

    def remember(self) -> None:
        """The cache belongs to this store: to one that was not reached by its name alone, as from
        now on there may be files for it. Of a new cache only once its mount answers, so that a
        first try with something wrong binds it to nothing."""
        if self.problem is not None:
            if self.is_fresh:
                self._meta.set_setting("store_url", self._settings.store.url)
            return
        with self._meta.transaction():
            if self._identity is not None:
                self._meta.set_setting("store_id", self._identity)
            self._meta.set_setting("store_url", self._settings.store.url)
            self._meta.set_setting("store_endpoint", self._settings.store.endpoint or "")
        self.usable.set()

    async def keep_trying(self) -> None:
        """Open the session behind a mount that came up without its store."""
        delay = 0.5
        while True:
            try:
                await self.open()
                self.remember()
                log.info("the store can be used")
                return
            except (StoreError, MountError) as error:
                self.problem = str(error)
                if isinstance(error, StoreError) and error.retry is Retry.RELOAD:
                    await self._client.recover(error)
            await trio.sleep(delay)
            delay = min(2 * delay, 10.0)

    async def tidy_up(self) -> None:
        """Remove what probes that were interrupted left in the store; not urgent."""
        try:
            await remains.remove(self._client, self._owner)
        except StoreError as error:
            log.info("remains of probes could not be looked for", reason=str(error))

    async def keep_looking(self) -> None:
        """A store that did not answer is asked now and then, so that it is known to be back even if
        nothing is to be done there."""
        while True:
            await trio.sleep(_LOOK)
            if self._client.is_unreachable:
                with suppress(StoreError):
                    await self._client.call("head", key=_ID_KEY)


class BucketReader:
    """The filesystem's view of the bucket, through the movers."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    async def list_page(
        self, prefix: str, token: str | None
    ) -> tuple[Sequence[RemoteObject], Sequence[str], str | None]:
        """See `vfs.remote.RemoteReader`."""
        page: Listing = await self._client.call("list", prefix=prefix, delimiter="/", token=token)
        objects = [self._object(info) for info in page.objects]
        prefixes = [self._client.relative(each) for each in page.prefixes]
        return objects, prefixes, page.next_token

    async def head(self, key: str) -> RemoteObject:
        """See `vfs.remote.RemoteReader`."""
        return self._object(await self._client.call("head", key=key))

    async def read(self, key: str, limit: int) -> bytes:
        """See `vfs.remote.RemoteReader`."""
        data: bytes = await self._client.call("get_bytes", key=key, start=0, end=limit)
        return data

    def _object(self, info: ObjectInfo) -> RemoteObject:
        metadata = tuple(info.metadata.items()) if info.metadata else None
        return RemoteObject(
            self._client.relative(info.key), info.size, info.etag, info.mtime_ns, info.crc64,
            metadata,
        )  # fmt: skip
