"""Files of the bucket that are larger than the cache are appended to and edited in place."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_streaming import CACHE, LARGER, MIB, PATIENCE, SMALL, digest_of, watched
from tests.support.client import Client
from tests.support.mounts import Failed, MountFactory, poll

COUNT = 200
"""MiB of the object."""
AT = (117 << 20) + 4321
"""Where it is patched."""
PATCH = b"edited" * 683
MORE = bytes(range(256)) * 4096


@pytest.fixture(params=["s3", "directory"])
def store(request: Any) -> Any:
    """Both kinds of store."""
    return request.getfixturevalue("bucket" if request.param == "s3" else "dir_store")


def content() -> bytes:
    pool = random.Random(5).randbytes(2 << 20)
    return b"".join(
        number.to_bytes(8, "big") + pool[number * 4099 % MIB :][: MIB - 8]
        for number in range(COUNT)
    )


def edited(body: bytes) -> str:
    """SHA-256 of what the file is to be."""
    return hashlib.sha256(body[:AT] + PATCH + body[AT + len(PATCH) :] + MORE).hexdigest()


def put(store: Any, key: str, body: bytes) -> None:
    """As another machine does."""
    if hasattr(store, "put"):
        store.put(key, body)
    else:
        (store.path / "other").write_bytes(body)
        os.replace(store.path / "other", store.path / key)


def digest(store: Any, key: str) -> str:
    return hashlib.sha256(store.get(key)).hexdigest()


def hidden(store: Any) -> list[str]:
    """Ranges and copies that are in the store unseen."""
    if hasattr(store, "path"):
        found = store.path.glob(".cachefs/spans/**/*")
        return [str(each) for each in found if each.is_file()]
    return [key for key in store.keys(reserved=True) if key.startswith(".cachefs/spans/")]


def edit(path: str, at: int, patch: bytes, more: bytes, told: str, go_on: str) -> list[Any]:
    """Append, then patch once `go_on` is there; what is read back of both and of some bytes before,
    and the size."""
    fd = os.open(path, os.O_RDWR)
    size = os.fstat(fd).st_size
    assert os.pwrite(fd, more, size) == len(more)
    if told:
        open(told, "w").close()
        while not os.path.exists(go_on):
            time.sleep(0.02)
    assert os.pwrite(fd, patch, at) == len(patch)
    os.fsync(fd)
    seen: list[Any] = [
        os.pread(fd, len(patch), at),
        os.pread(fd, 4096, size - 2048),
        os.pread(fd, 8, 9 << 20),
    ]
    seen.append(os.fstat(fd).st_size)
    os.close(fd)
    return seen


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lane", ["tracked"])
def test_append_and_patch(
    mounted: MountFactory, store: Any, client: Client, tmp_path: Path
) -> None:
    """The daemon dies meanwhile: all of it is right, and the cache stays within its size."""
    body, told, go_on = content(), tmp_path / "told", tmp_path / "go"
    put(store, "huge.bin", body)
    mount = mounted(store, options=SMALL, allow=(*LARGER, "ended unexpectedly"))
    with watched(mount) as most:
        writer = client.start(edit, mount.path / "huge.bin", AT, PATCH, MORE, told, go_on)
        poll(told.exists, 60)
        mount.took_over(mount.kill_daemon())
        go_on.touch()
        seen = writer.result(60)
        mount.wait(timeout=60)
    size = COUNT * MIB
    assert seen == [PATCH, body[-2048:] + MORE[:2048], body[9 * MIB :][:8], size + MIB]
    print(f"at most {most[0] / MIB:.1f} MiB, {most[1] / MIB:.1f} MiB of files")
    assert max(most) <= CACHE * MIB
    assert digest(store, "huge.bin") == edited(body)
    assert client.run(digest_of, mount.path / "huge.bin", timeout=60) == edited(body)
    poll(lambda: not hidden(store), PATIENCE, what="hidden objects are deleted")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lane", ["tracked"])
def test_the_object_is_replaced_meanwhile(
    mounted: MountFactory, store: Any, client: Client, tmp_path: Any
) -> None:
    """Both are kept, each whole: theirs has the key, ours is beside it."""
    body, told, go_on = content(), tmp_path / "told", tmp_path / "go"
    put(store, "huge.bin", body)
    mount = mounted(store, options=SMALL, allow=(*LARGER, "conflict"))
    writer = client.start(edit, mount.path / "huge.bin", AT, PATCH, MORE, told, go_on)
    poll(told.exists, 60)
    put(store, "huge.bin", MORE)
    go_on.touch()
    writer.result(60)
    with pytest.raises(Failed) as failed:
        mount.wait(timeout=60)
    assert failed.value.exit_code == 5
    assert digest(store, "huge.bin") == hashlib.sha256(MORE).hexdigest()
    (ours,) = [key for key in list(store.keys()) if key.startswith("huge.bin.conflict")]
    assert digest(store, ours) == edited(body)


def only_open(path: str) -> None:
    """For writing, without a write."""
    os.close(os.open(path, os.O_WRONLY))


def overwrite(path: str, pieces: int) -> str:
    """Write every second MiB anew: more than the cache holds; the SHA-256 of all of it then."""
    fd = os.open(path, os.O_RDWR)
    for number in range(0, pieces, 2):
        body = number.to_bytes(4, "big") * (1 << 18)
        assert os.pwrite(fd, body, number << 20) == len(body)
    whole = hashlib.sha256()
    for number in range(pieces):
        whole.update(os.pread(fd, 1 << 20, number << 20))
    os.close(fd)
    return whole.hexdigest()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lane", ["tracked"])
def test_more_is_written_than_the_cache_holds(
    mounted: MountFactory, dir_store: Any, client: Client
) -> None:
    """What is written anew leaves the cache, too; what was only opened stays as it was."""
    body = content()
    put(dir_store, "huge.bin", body)
    mount = mounted(dir_store, options=SMALL, allow=LARGER)
    client.run(only_open, mount.path / "huge.bin", timeout=60)
    mount.wait()
    assert digest(dir_store, "huge.bin") == hashlib.sha256(body).hexdigest()
    with watched(mount) as most:
        seen = client.run(overwrite, mount.path / "huge.bin", COUNT, timeout=100)
        mount.wait(timeout=60)
    anew = [n.to_bytes(4, "big") * (1 << 18) for n in range(COUNT)]
    wanted = b"".join(
        anew[n] if n % 2 == 0 else body[n * MIB : (n + 1) * MIB] for n in range(COUNT)
    )
    assert seen == hashlib.sha256(wanted).hexdigest() == digest(dir_store, "huge.bin")
    assert max(most) <= CACHE * MIB
    assert mount.metric("cachefs_offloaded_bytes_total") > 0
    poll(lambda: not hidden(dir_store), PATIENCE, what="hidden objects are deleted")
