"""What probes of the store (`store.s3probe`) that were interrupted left in it.

    .cachefs/probe-<owner>-<number>     an object of some bytes, a multipart upload with one part

A cache has one daemon at a time: once that has probed, whatever else bears the cache's name is
nobody's. What others left is theirs to remove, until it is so old that they do not come back.
"""

from __future__ import annotations

import time

from cachefs.flush.client import StoreClient
from cachefs.model.names import PROBES
from cachefs.store.base import Listing, Uploads

ABANDONED = 6 * 3600.0
"""Seconds after which no probe is under way: far more than one takes and clocks differ."""
_S = 1_000_000_000


async def remove(client: StoreClient, owner: str) -> None:
    """Remove what is nobody's; of very much the first thousand. StoreError."""

    def is_left(key: str, made_ns: int) -> bool:
        is_own = client.relative(key).startswith(f"{PROBES}{owner}-")
        return is_own or time.time_ns() - made_ns > ABANDONED * _S

    uploads: Uploads = await client.call("list_uploads", prefix=PROBES)
    for each in uploads:
        if is_left(each.key, each.started_ns):
            key = client.relative(each.key)
            await client.call("abort_upload", key=key, upload_id=each.upload_id)
    page: Listing = await client.call("list", prefix=PROBES)
    keys = [client.relative(each.key) for each in page.objects if is_left(each.key, each.mtime_ns)]
    if keys:
        await client.call("delete", keys=keys)
