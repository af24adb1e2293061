"""Credentials that run out during an upload, and new ones that appear in their file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import expired_token
from tests.support.mounts import MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def test_credentials_that_expire_midway(
    mounted: MountFactory, bucket: Any, faults: Any, ram_dir: Path
) -> None:
    """The file is read again when the store refuses what was in it; what was sent stays sent."""
    key, secret = (bucket.env[name] for name in KEYS)
    file = ram_dir / "credentials"

    def write_credentials(secret: str) -> None:
        beside = file.with_suffix(".new")
        lines = ("[default]", f"aws_access_key_id={key}", f"aws_secret_access_key={secret}")
        beside.write_text("\n".join(lines))
        beside.rename(file)

    write_credentials(secret)
    env = {**dict.fromkeys(KEYS, ""), "AWS_SHARED_CREDENTIALS_FILE": str(file)}
    allowed = ("credential", "SignatureDoesNotMatch", "ExpiredToken", "again")
    mount = mounted(bucket, endpoint=faults.endpoint, env=env, allow=allowed)
    body = os.urandom(96 * MIB)
    write_credentials("out of date")
    faults.set(expired_token(ops=("upload_part",), skip=2, count=1))
    (mount.path / "model.bin").write_bytes(body)

    def is_refused() -> bool:
        counts = faults.counts()
        return any(name.endswith(" 403") and count >= 3 for name, count in counts.items())

    poll(is_refused, 30, what="the new credentials to be tried")
    assert bucket.keys() == []
    write_credentials(secret)
    mount.wait(timeout=60)
    assert bucket.get("model.bin") == body
    assert bucket.uploads() == []
    assert faults.counts()["upload_part 200"] <= 9, "of six parts, what was under way at most"
