"""Cache devices: files, directory entries, errors for people."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.cache.system import DeviceKind, device_kind, stack_depth
from cachefs.errors import CacheError
from cachefs.model.survival import Level


def put(device: CacheDevice, gen: int, data: bytes) -> None:
    fd = device.create(gen)
    os.pwrite(fd, data, 0)
    os.close(fd)


def get(device: CacheDevice, gen: int) -> bytes:
    return Path(device.path(gen)).read_bytes()


# ---- files


def test_a_created_file_is_empty_private_and_writable(device: CacheDevice) -> None:
    fd = device.create(7)
    os.pwrite(fd, b"abc", 1)
    assert os.pread(fd, 9, 0) == b"\0abc"
    os.close(fd)
    path = Path(device.path(7))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for directory in (path.parent, path.parent.parent, device.meta_dir, device.directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_descriptors_are_not_inherited(device: CacheDevice) -> None:
    fd = device.create(7)
    assert not os.get_inheritable(fd)
    os.close(fd)
    fd = device.open(7)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_generation_is_created_once(device: CacheDevice) -> None:
    put(device, 7, b"first")
    with pytest.raises(FileExistsError):
        device.create(7)
    assert get(device, 7) == b"first"


def test_open_never_creates(device: CacheDevice) -> None:
    with pytest.raises(FileNotFoundError):
        device.open(7, os.O_RDWR | os.O_CREAT)
    assert not device.exists(7)


def test_open_obeys_its_flags(device: CacheDevice) -> None:
    put(device, 7, b"abc")
    fd = device.open(7)
    with pytest.raises(OSError, match="descriptor") as caught:
        os.pwrite(fd, b"x", 0)
    assert caught.value.errno == errno.EBADF
    os.close(fd)
    fd = device.open(7, os.O_RDWR)
    assert os.pwrite(fd, b"x", 0) == 1
    os.close(fd)


def test_a_symlink_in_the_place_of_a_cache_file_is_not_followed(device: CacheDevice) -> None:
    put(device, 7, b"abc")
    os.symlink(device.path(7), device.path(7 + 256))
    with pytest.raises(OSError, match="symbolic") as caught:
        device.open(7 + 256)
    assert caught.value.errno == errno.ELOOP


def test_removing_is_idempotent(device: CacheDevice) -> None:
    put(device, 7, b"abc")
    assert device.exists(7)
    device.remove(7)
    device.remove(7)
    assert not device.exists(7)
    assert device.allocated(7) == 0


def test_a_removed_shard_directory_comes_back(device: CacheDevice) -> None:
    put(device, 7, b"abc")
    device.remove(7)
    Path(device.path(7)).parent.rmdir()
    put(device, 7, b"def")
    assert get(device, 7) == b"def"


def test_generations_are_listed_and_strangers_passed_over(device: CacheDevice) -> None:
    gens = [1, 2, 255, 256, 257, 10**12]
    for gen in gens:
        put(device, gen, b"x")
    (Path(device.path(1)).parent / "core").write_bytes(b"")
    (device.directory / "files" / "notes.txt").write_bytes(b"")
    assert sorted(device.list_generations()) == gens


def test_allocation_counts_data_and_not_holes(device: CacheDevice) -> None:
    fd = device.create(7)
    os.ftruncate(fd, 1 << 30)
    os.pwrite(fd, b"x" * 65536, 1 << 20)
    os.close(fd)
    put(device, 8, b"x" * 65536)
    assert device.stat(7).st_size == 1 << 30
    assert 65536 <= device.allocated(7) <= 131072
    assert device.allocated_total() == device.allocated(7) + device.allocated(8)


def test_punching_gives_blocks_back_and_keeps_the_size(device: CacheDevice) -> None:
    put(device, 7, b"x" * (1 << 20))
    before = device.allocated(7)
    device.punch(7, 65536, 1 << 19)
    assert before - device.allocated(7) == (1 << 19) - 65536
    data = get(device, 7)
    assert len(data) == 1 << 20
    assert data[65535:65537] == b"x\0"
    assert data[(1 << 19) - 1 : (1 << 19) + 1] == b"\0x"
    device.punch(7, 5, 5)


# ---- what survives a power cut


class Syncs:
    """Records which directories are synced, by name below the device."""

    def __init__(self, device: CacheDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self._device = device
        self._real = os.fsync
        self.names: list[str] = []
        self.error: OSError | None = None
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self.error is not None:
            raise self.error
        self.names.append(str(path.relative_to(self._device.directory)))
        self._real(fd)

    def take(self) -> list[str]:
        names, self.names = self.names, []
        return names


@pytest.fixture
def syncs(device: CacheDevice, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    return Syncs(device, monkeypatch)


def test_directory_entries_are_synced_once(device: CacheDevice, syncs: Syncs) -> None:
    put(device, 0x107, b"")
    put(device, 0x207, b"")
    assert device.sync_dir(0x107)
    assert syncs.take() == ["files/07", "files"]
    assert not device.sync_dir(0x107)
    assert not device.sync_dir(0x207), "created together, synced together"
    assert syncs.take() == []
    put(device, 0x307, b"")
    assert device.sync_dir(0x307)
    assert syncs.take() == ["files/07"], "the shard directory is not new any more"
    put(device, 0x308, b"")
    assert device.sync_dir(0x308)
    assert syncs.take() == ["files/08", "files"]


def test_clones_and_adopted_files_are_new_entries(
    device: CacheDevice, syncs: Syncs, place: Path
) -> None:
    put(device, 0x107, b"abc")
    device.sync_dir(0x107)
    syncs.take()
    device.clone(0x107, 0x207)
    assert device.sync_dir(0x207)
    (place / "loose").write_bytes(b"abc")
    device.adopt(place / "loose", 0x307)
    assert device.sync_dir(0x307)
    assert syncs.take() == ["files/07", "files/07"]


def test_a_failed_sync_is_not_forgotten(device: CacheDevice, syncs: Syncs) -> None:
    put(device, 0x107, b"")
    syncs.error = OSError(errno.EIO, "broken")
    with pytest.raises(OSError, match="broken"):
        device.sync_dir(0x107)
    syncs.error = None
    assert device.sync_dir(0x107)
    assert syncs.take() == ["files/07", "files"]


def test_entries_of_an_earlier_process_are_synced_at_first_use(
    device: CacheDevice, syncs: Syncs
) -> None:
    put(device, 0x107, b"")
    device.close()
    again = CacheDevice(0, device.directory)
    try:
        assert again.sync_dir(0x107)
        assert syncs.take() == ["files/07", "files"]
        assert not again.sync_dir(0x107)
    finally:
        again.close()


# ---- copies


def test_a_clone_is_equal_and_independent(device: CacheDevice) -> None:
    put(device, 1, b"x" * 100_000)
    assert device.clone(1, 2) in ("reflink", "copy")
    fd = device.open(1, os.O_RDWR)
    os.pwrite(fd, b"y", 0)
    os.close(fd)
    assert get(device, 2) == b"x" * 100_000


def test_a_clone_that_does_not_fit_leaves_nothing(small_device: CacheDevice) -> None:
    put(small_device, 1, b"x" * (5 << 20))
    with pytest.raises(OSError, match="space") as caught:
        small_device.clone(1, 2)
    assert caught.value.errno == errno.ENOSPC
    assert not small_device.exists(2)
    assert small_device.free_bytes() > 2 << 20


def test_files_can_be_cloned_from_another_device(device: CacheDevice, tmp_path: Path) -> None:
    other = CacheDevice(1, tmp_path / "other")
    try:
        put(other, 5, b"abc")
        device.clone_from(other.path(5), 5)
        assert get(device, 5) == b"abc"
    finally:
        other.close()


def test_adopting_takes_no_copy(device: CacheDevice, place: Path) -> None:
    loose = place / "snapshot"
    loose.write_bytes(b"abc")
    loose.chmod(0o644)
    inode = loose.stat().st_ino
    assert device.adopt(loose, 7) == "link"
    assert loose.exists(), "the caller removes it once the metadata knows the generation"
    loose.unlink()
    assert device.stat(7).st_ino == inode
    assert stat.S_IMODE(device.stat(7).st_mode) == 0o600
    assert get(device, 7) == b"abc"


def test_adopting_a_file_with_other_names_copies_it(device: CacheDevice, place: Path) -> None:
    loose = place / "snapshot"
    loose.write_bytes(b"abc")
    os.link(loose, place / "other name")
    assert device.adopt(loose, 7) in ("reflink", "copy")
    (place / "other name").write_bytes(b"changed")
    assert get(device, 7) == b"abc"


def test_adopting_from_elsewhere_copies(device: CacheDevice, small_fs: Path) -> None:
    (small_fs / "loose").write_bytes(b"abc")
    assert device.adopt(small_fs / "loose", 7) == "copy"
    assert get(device, 7) == b"abc"


def test_a_file_that_is_still_being_written_is_not_adopted(
    device: CacheDevice, place: Path
) -> None:
    with (
        (place / "snapshot").open("wb"),
        pytest.raises(OSError, match="open for writing") as caught,
    ):
        device.adopt(place / "snapshot", 7)
    assert caught.value.errno == errno.ETXTBSY
    assert not device.exists(7)


@pytest.mark.parametrize("kind", ["directory", "symlink", "fifo"])
def test_only_regular_files_are_adopted(device: CacheDevice, place: Path, kind: str) -> None:
    strange = place / "strange"
    if kind == "directory":
        strange.mkdir()
    elif kind == "symlink":
        strange.symlink_to(place / "target")
    else:
        os.mkfifo(strange)
    with pytest.raises(OSError, match="regular") as caught:
        device.adopt(strange, 7)
    assert caught.value.errno == errno.EINVAL


def test_adopting_over_a_generation_is_refused(device: CacheDevice, place: Path) -> None:
    put(device, 7, b"old")
    (place / "loose").write_bytes(b"new")
    with pytest.raises(FileExistsError):
        device.adopt(place / "loose", 7)
    assert get(device, 7) == b"old"


# ---- what the device is


def test_kind_and_survival_follow_the_filesystem(place: Path, device: CacheDevice) -> None:
    if str(place).startswith("/dev/shm"):
        assert (device.kind, device.survives) == (DeviceKind.RAM, Level.PROCESS)
        assert device.filesystem == "tmpfs"
    else:
        assert (device.kind, device.survives) == (DeviceKind.DISK, Level.REBOOT)
    assert device.stack_depth in (1, 2)
    assert 0 < device.free_bytes() <= device.total


def test_survival_can_be_configured(place: Path) -> None:
    device = CacheDevice(0, place / "volume", survives=Level.INSTANCE)
    assert device.survives is Level.INSTANCE
    device.close()


@pytest.mark.parametrize(
    ("magic", "kind"),
    [
        (0x858458F6, DeviceKind.RAM),
        (0x6969, DeviceKind.NETWORK),
        (0x0BD00BD0, DeviceKind.NETWORK),
        (0x65735546, DeviceKind.NETWORK),
        (0xEF53, DeviceKind.DISK),
        (0x12345678, DeviceKind.DISK),
    ],
)
def test_kinds_by_magic_number(magic: int, kind: DeviceKind) -> None:
    assert device_kind(magic) is kind


def test_a_stacked_filesystem_needs_more_depth(tmp_path: Path, place: Path) -> None:
    assert (stack_depth(0x794C7630), stack_depth(0xF15F), stack_depth(0xEF53)) == (2, 2, 1)
    parts = {name: place / name for name in ("lower", "upper", "work", "merged")}
    for path in parts.values():
        path.mkdir()
    options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**parts)
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "overlay", str(parts["merged"])],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("no overlay mounts here")
    try:
        device = CacheDevice(0, parts["merged"] / "cache")
        assert device.stack_depth == 2
        assert device.filesystem == "overlayfs"
        put(device, 1, b"abc")
        assert device.clone(1, 2) == "copy"
        device.close()
        time.sleep(0.2)  # the heartbeat closes its file at its next beat
    finally:
        subprocess.run(["umount", "-l", str(parts["merged"])], check=True)


# ---- errors for people


def test_a_missing_parent_is_named(place: Path) -> None:
    with pytest.raises(CacheError, match="does not exist") as caught:
        CacheDevice(0, place / "no" / "cache")
    assert str(place / "no") in str(caught.value)
    assert caught.value.hint


def test_a_file_is_no_cache_directory(place: Path) -> None:
    (place / "file").write_bytes(b"")
    with pytest.raises(CacheError, match="not a directory"):
        CacheDevice(0, place / "file")
    with pytest.raises(CacheError, match="Not a directory"):
        CacheDevice(0, place / "file" / "below")


def test_an_unwritable_directory_is_refused(small_fs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_fs)], check=True)
    with pytest.raises(CacheError, match="Read-only") as caught:
        CacheDevice(0, small_fs)
    assert "writable" in caught.value.hint
    with pytest.raises(CacheError, match="Read-only"):
        CacheDevice(0, small_fs / "new")


def test_messages_are_one_line(place: Path) -> None:
    for path in (place / "no" / "cache", Path("/proc/cache"), Path("/dev/null")):
        with pytest.raises(CacheError) as caught:
            CacheDevice(0, path)
        assert "\n" not in f"{caught.value} {caught.value.hint}"


def test_a_full_disk_does_not_keep_an_existing_cache_from_opening(small_fs: Path) -> None:
    device = CacheDevice(0, small_fs / "cache")
    put(device, 1, b"abc")
    device.close()
    fill = os.open(small_fs / "ballast", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="space"):
        while True:
            os.write(fill, b"x" * 65536)
    os.close(fill)
    again = CacheDevice(0, small_fs / "cache")
    assert get(again, 1) == b"abc"
    time.sleep(0.25)
    assert again.healthy, "full is not broken"
    again.close()
