"""boto3 clients for one store: how they are set up, and when they are thrown away.

boto3 reads shared credential files once per session. Keys in such a file are rotated while training
runs, so a client whose credentials were refused is discarded and the next request builds a fresh
session from the usual AWS chain.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import IncompleteReadError
from botocore.loaders import Loader

from cachefs.errors import UsageError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

DEFAULT_REGION = "us-east-1"
REBUILD_INTERVAL = 1.0
"""Seconds between fresh sessions: building one takes 10 ms of CPU and may ask a metadata
service."""


class _FewServices(Loader):
    """What botocore knows of S3, and of what hands out keys (roles, web identities, single
    sign-on); parsed once in a process. Sessions have nothing else in common."""

    def list_available_services(self, type_name: str) -> list[str]:
        """Without looking through the 400 directories of all the others."""
        return ["s3", "sts", "sso", "sso-oidc", "signin"]


_LOADER = _FewServices()


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach a bucket: the settings of section `store` that concern S3."""

    bucket: str
    prefix: str = ""
    """Without slashes at its ends."""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: str = "auto"
    checksum: str = "auto"
    connect_timeout: float = 5.0
    read_timeout: float = 60.0
    connections: int = 10
    """Size of the HTTP pool; must not be below the number of threads that use the store."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> S3Options:
        """From the settings' plain values. Raises UsageError for a URL without a bucket."""
        url = urlsplit(str(settings["url"]))
        if not url.netloc:
            raise UsageError(f"store URL {settings['url']!r} names no bucket")
        return cls(
            bucket=url.netloc,
            prefix=str(settings["url"]).partition("://")[2].partition("/")[2].strip("/"),
            endpoint=settings.get("endpoint") or None,
            region=settings.get("region") or None,
            profile=settings.get("profile") or None,
            addressing=str(settings.get("addressing", "auto")),
            checksum=str(settings.get("checksum", "auto")),
            connect_timeout=float(settings.get("connect_timeout", 5.0)),
            read_timeout=float(settings.get("read_timeout", 60.0)),
            connections=int(settings.get("max_connections") or 10),
        )


class ClientSource:
    """The current client, thread-safe."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._client: S3Client | None = None
        self._built = 0.0

    def get(self) -> S3Client:
        """The client to use for one request. Raises botocore's errors about profiles and files."""
        with self._lock:
            if self._client is None:
                self._client = _build(self._options)
                self._built = time.monotonic()
            return self._client

    def discard(self, client: S3Client | None = None) -> None:
        """Build anew at the next request. With `client`, only if that is still the current one and
        not just built: many threads fail at once, and wrong credentials stay wrong for a while."""
        with self._lock:
            fresh = time.monotonic() - self._built < REBUILD_INTERVAL
            if client is None or (client is self._client and not fresh):
                self._client = None


def _build(options: S3Options) -> S3Client:
    core = botocore.session.Session()
    core.register_component("data_loader", _LOADER)
    session = boto3.session.Session(botocore_session=core, profile_name=options.profile)
    addressing: Any = options.addressing
    if addressing == "auto":  # stores other than AWS rarely have a DNS name per bucket
        addressing = "path" if options.endpoint else "auto"
    config = Config(
        signature_version="s3v4",
        # Retries are the flusher's: it knows what else waits, and whether the bytes still matter.
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=options.connect_timeout,
        read_timeout=options.read_timeout,
        max_pool_connections=options.connections,
        tcp_keepalive=True,
        # Checksums are computed here and sent as plain headers; boto3's own need trailers, which
        # many stores refuse, and a second pass over the body.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": addressing, "payload_signing_enabled": False},
    )
    client = session.client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=options.region or session.region_name or DEFAULT_REGION,
        config=config,
    )
    client.meta.events.register("before-parse.s3", _check_length)
    return client


def _check_length(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """botocore takes a reply without its body for an empty result: "no objects", "all deleted"."""
    body, length = response_dict.get("body"), response_dict["headers"].get("content-length")
    if not isinstance(body, bytes) or length is None or operation_model.name.startswith("Head"):
        return
    if len(body) < int(length):
        raise IncompleteReadError(actual_bytes=len(body), expected_bytes=int(length))
