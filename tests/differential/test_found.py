"""Programs that once ran differently on a mount and on a local directory, as short as they get."""

from __future__ import annotations

import pytest

from tests.differential.pair import Pair
from tests.differential.programs import Program

TO_COME = 2_000_000_000_000_000_000
"""A time in 2033, in ns."""
PROGRAMS: dict[str, Program] = {
    "a write changes ctime though a chmod came just before": [
        [0, "open", 0, "a", "RDWR|CREAT", 0o644],
        *[
            step
            for mode in (0o600, 0o640, 0o644, 0o666, 0o400)
            for step in (
                [0, "chmod", "a", mode],
                [0, "fstat", 0],
                [0, "write", 0, 1, 10],
                [0, "fstat", 0],
            )
        ],
    ],
    "ctime moves with each change, open or not": [
        [0, "open", 0, "a", "RDWR|CREAT", 0o644],
        [0, "fstat", 0],
        [0, "link", "a", "b"],
        [0, "stat", "a"],
        [0, "write", 0, 1, 10],
        [0, "stat", "b"],
        [0, "close", 0],
        [0, "chmod", "a", 0o600],
        [0, "stat", "a"],
        [0, "open", 0, "a", "WRONLY|TRUNC", 0],
        [0, "stat", "a"],
        [0, "rename", "a", "c"],
        [0, "stat", "c"],
        [0, "write", 0, 2, 10],
        [0, "stat", "c"],
    ],
    "truncated to the size it has": [
        [1, "open", 1, "b", "RDWR|CREAT|TRUNC", 0o400],
        [0, "lstat", "b"],
        [1, "ftruncate", 1, 0],
        [0, "lstat", "b"],
        [0, "truncate", "b", 0],
        [0, "lstat", "b"],
    ],
    "a file with content is truncated to the size it has": [
        [1, "open", 0, "b", "RDWR|CREAT|APPEND", 0o600],
        [1, "write", 0, 19, 10],
        [1, "truncate", "b", 8192],
        [1, "stat", "b"],
        [0, "truncate", "b", 8192],
        [1, "stat", "b"],
        [1, "close", 0],
        [1, "truncate", "b", 8192],
        [1, "stat", "b"],
    ],
    "truncated by an open for reading": [
        [1, "open", 2, "c", "RDWR|CREAT|SYNC", 0o600],
        [1, "ftruncate", 2, 8192],
        [1, "open", 0, "c", "RDONLY|TRUNC", 0],
        [1, "fstat", 0],
        [1, "close", 0],
        [1, "close", 2],
        [1, "stat", "c"],
    ],
    "an empty file that is open is truncated by another open": [
        [1, "open", 0, "e", "RDONLY|CREAT", 0o755],
        [1, "fstat", 0],
        [1, "open", 0, "e", "RDWR|CREAT|TRUNC", 0o400],
    ],
    "set-user-id of a file that its owner is writing to": [
        [1, "open", 0, "a", "RDWR|CREAT", 0o644],
        [0, "chmod", "a", 0o4755],
        [0, "stat", "a"],
        [1, "write", 0, 1, 1],
        [0, "stat", "a"],
        [0, "chmod", "a", 0o4755],
        [0, "open", 0, "a", "WRONLY", 0],
        [0, "write", 0, 1, 1],
        [0, "stat", "a"],
        [1, "write", 0, 1, 1],
        [0, "stat", "a"],
    ],
    "an owner that stays the same": [
        [0, "mkdir", "b", 0o755],
        [0, "open", 0, "a", "RDWR|CREAT", 0o4755],
        *[
            step
            for name in ("a", "b")
            for step in (
                [1, "stat", name],
                [1, "chown", name, -1, -1, True],
                [0, "stat", name],
                [0, "chown", name, -1, -1, True],
                [0, "stat", name],
            )
        ],
    ],
    "cut right after space was made": [
        [1, "open", 0, "a", "RDONLY|CREAT", 0],
        [1, "close", 0],
        [0, "open", 0, "a", "RDWR|CREAT", 0],
        [0, "fallocate", 0, 0, 1_000_000, 4097],
        [0, "truncate", "a", 100],
    ],
    "a time to come is not that of the change": [
        [0, "open", 0, "a", "RDWR|CREAT", 0o644],
        [0, "write", 0, 1, 10],
        [0, "futimens", 0, TO_COME, TO_COME],
        [0, "close", 0],
        [0, "chmod", "a", 0o600],
        [0, "open", 0, "a", "RDWR", 0],
        [0, "fstat", 0],
        [0, "write", 0, 1, 10],
        [0, "fstat", 0],
    ],
    "the time of now is not before that of the last change": [
        [0, "open", 0, "a", "RDWR|CREAT", 0o644],
        [0, "mkdir", "d", 0o755],
        *[
            step
            for number in range(20)
            for step in (
                [0, "pwrite", 0, number + 1, 10, 0],
                [0, "stat", "a"],
                [0, "touch", "a"],
                [0, "stat", "a"],
                [1, "stat", "d"],
                [0, "touch", "d"],
                [1, "stat", "d"],
            )
        ],
        [0, "close", 0],
        [0, "chmod", "a", 0o600],
        [0, "stat", "a"],
        [0, "!kill"],
        [0, "touch", "a"],
        [0, "stat", "a"],
    ],
    "space for a file that was opened for reading and writing": [
        [0, "open", 0, "a", "RDWR|CREAT", 0o644],
        [0, "write", 0, 1, 100],
        [0, "close", 0],
        [0, "open", 0, "a", "RDWR", 0],
        [0, "fallocate", 0, 0, 50, 10_000],
        [0, "fstat", 0],
        [0, "pread", 0, 20_000, 0],
        [0, "fallocate", 0, 0, 0, 20_000],
        [0, "fstat", 0],
    ],
}
IN_THE_BUCKET: dict[str, Program] = {
    "an exchange that a bucket cannot do": [
        [1, "mkdir", "d", 0o777],
        [1, "mkdir", "d/e", 0o700],
        [1, "utimens", "d", 0, 999_999_999, False],
        [1, "mkdir", "c", 0o755],
        [0, "!durable"],
        [0, "renameat2", "d/e", "c", 2],
        [0, "lstat", "d"],
    ],
    "a second name before the first close": [
        [1, "open", 1, "e", "RDWR|CREAT|EXCL", 0o400],
        [1, "link", "e", "b"],
    ],
    "truncated to the size that the bucket knows": [
        [1, "open", 1, "c", "RDWR|CREAT", 0o666],
        [1, "write", 1, 7, 100],
        [1, "close", 1],
        [0, "!durable"],
        [0, "stat", "c"],
        [0, "truncate", "c", 100],
        [0, "stat", "c"],
    ],
    "what was read is truncated to the size it had": [
        [1, "open", 1, "c", "RDWR|CREAT|EXCL", 0o666],
        [1, "close", 1],
        [0, "!durable"],
        [0, "open", 1, "c", "RDONLY", 0],
        [0, "fstat", 1],
        [1, "open", 2, "c", "WRONLY|CREAT|TRUNC", 0],
        [0, "fstat", 1],
        [1, "close", 2],
        [0, "fstat", 1],
    ],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_found(shared_pair: Pair, name: str) -> None:
    """The same answers on both sides."""
    shared_pair.run(PROGRAMS[name])


@pytest.mark.parametrize("name", IN_THE_BUCKET)
def test_found_in_the_bucket(shared_bucket_pair: Pair, name: str) -> None:
    """The same tree on both sides, and in the bucket soon after."""
    shared_bucket_pair.run(IN_THE_BUCKET[name])
