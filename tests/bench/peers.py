"""The programs that cachefs is measured against: where they are, how they find the store."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.support.stores import StoredBucket


def program(name: str) -> str:
    """The path of a program of the extra `bench`, or of this machine."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert path is not None, f"{name} is not installed: pip install 'cachefs[bench]'"
    return path


def rclone_settings(bucket: StoredBucket) -> dict[str, str]:
    """Environment in which rclone knows the store of this bucket as `sea:`."""
    return {
        "RCLONE_CONFIG": "/dev/null",
        "RCLONE_CONFIG_SEA_TYPE": "s3",
        "RCLONE_CONFIG_SEA_PROVIDER": "SeaweedFS",
        "RCLONE_CONFIG_SEA_ENV_AUTH": "true",
        "RCLONE_CONFIG_SEA_ENDPOINT": bucket.endpoint,
    }
