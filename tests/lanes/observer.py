"""What the bucket shows while versions follow each other: each of them whole, or none."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

from botocore.exceptions import ClientError


def name_of(body: bytes) -> str:
    """How a content is told from others."""
    return hashlib.sha1(body).hexdigest()[:12]


class Observer:
    """Reads keys of a bucket again and again in a thread of its own."""

    def __init__(self, bucket: Any, keys: list[str]) -> None:
        self._bucket = bucket
        self._keys = keys
        self.seen: dict[str, list[str]] = {key: [] for key in keys}
        """Contents of each key in the order in which they were first seen; "" is: none."""
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(20)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        etags: dict[str, str] = {}
        try:
            while not self._end.is_set():
                for key in self._keys:
                    self._look(key, etags)
                time.sleep(0.02)
        except BaseException as error:
            self._error = error

    def _look(self, key: str, etags: dict[str, str]) -> None:
        """Get it unless it is what was there before."""
        bucket = self._bucket
        condition = {"IfNoneMatch": etags[key]} if key in etags else {}
        try:
            reply = bucket.client.get_object(
                Bucket=bucket.name, Key=bucket.prefix + key, **condition
            )
            etags[key] = reply["ETag"]
            found = name_of(reply["Body"].read())
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == 304:
                return
            assert status == 404, error
            etags.pop(key, None)
            found = ""
        if self.seen[key][-1:] != [found]:
            self.seen[key].append(found)
