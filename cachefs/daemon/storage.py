"""The cache devices of a mount and its database: opened, and told apart.

The database is on the first device that outlives a reboot (on the first one if none does), so a
device in RAM may come first. It knows the devices by their names (`cache.identity`) and by numbers
that never change, in whatever order they are given. One that it knows and that is not there is
represented by an `AbsentDevice`: what only that one has is reported, everything else goes on.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

from cachefs.cache import identity
from cachefs.cache.absent import AbsentDevice
from cachefs.cache.device import CacheDevice
from cachefs.cache.journal import Journal
from cachefs.cache.ledger import SpaceLedger, resolve_limits
from cachefs.cache.leftovers import Belongings
from cachefs.cache.system import DeviceKind, memory_places
from cachefs.config import Settings
from cachefs.errors import CacheError, DeviceMissing
from cachefs.flush.reboot import Reboots
from cachefs.meta import Meta, ring
from cachefs.meta.database import Damaged, SchemaTooNew, check_version, disk_error
from cachefs.meta.deferral import PATIENCE
from cachefs.model.survival import Level

log = structlog.get_logger("cachefs.daemon")

_DEVICES = "devices"
_NOT_GIVEN = "it is not among the cache directories of this mount"
_EMPTY = "its directory is empty (is its disk mounted? a new device needs another directory)"


@dataclass(slots=True)
class Storage:
    """Cache devices, their space, and the database: what a mount has before it has a store."""

    devices: list[CacheDevice]
    """By number. Some may be absent."""
    ledgers: list[SpaceLedger]
    meta: Meta
    home: CacheDevice
    """The one that the database is on."""
    _belongings: Belongings | None = None

    @property
    def name(self) -> str:
        """By which the cache's own are known among other caches' in the store. OSError."""
        return identity.read(self.home.directory) or ""

    def note_memory(self, places: Collection[Path]) -> None:
        """Note there what this cache has in memory, for when nobody starts it again. Without a note
        it stays until the machine goes down."""
        try:
            if self._belongings is None:
                place = next(memory_places(places))
                self._belongings = Belongings(place, self.name, self.home.directory)
            self._belongings.note(self._in_memory())
        except (OSError, StopIteration) as error:
            log.info("what is in memory could not be noted", reason=str(error))

    def _in_memory(self) -> list[Path]:
        tables = [each.closings.path for each in self.devices if each.closings is not None]
        journal = self.journal().file
        return [*ring.files(self.meta.db.path), *tables, *([journal] if journal else [])]

    def journal(self) -> Journal:
        """That of small files: in memory, where closes are noted, if there is such a place."""
        closings = self.home.closings
        memory = closings.directory if closings is not None else None
        return Journal(self.home.meta_dir / "journal", memory)

    def make_room(self) -> None:
        """The database has met a full disk: give it its reserve."""
        self.ledgers[self.home.index].release_reserve()

    def warnings(self) -> list[str]:
        """What a person should know of the devices, one line each."""
        told = [self.meta.db.note] if self.meta.db.note else []
        for device in self.devices:
            if not isinstance(device, AbsentDevice) or device.retired:
                continue
            lost = len(self.meta.generations.only_on(device.index))
            files = f"; {lost} files of it are not in the store" if lost else ""
            told.append(f"the cache device {device.directory} is missing: {device.failure}{files}")
        return told

    def shares_disk(self, fd: int) -> bool:
        """Whether a file is on the disk of a cache device, and stalls with it."""
        disks = {os.stat(each.directory).st_dev for each in self.devices if not each.apart.direct}
        return os.fstat(fd).st_dev in disks

    def close(self) -> None:
        """Give everything up."""
        self.meta.close()
        for device in self.devices:
            device.close()
        if self._belongings is not None:
            self._belongings.close()


@dataclass(slots=True)
class _Given:
    """The directories of the settings: devices in their order, and what is not there."""

    devices: list[CacheDevice] = field(default_factory=list)
    missing: dict[str, DeviceMissing] = field(default_factory=dict)

    def close(self) -> None:
        for device in self.devices:
            device.close()

    def require_all(self) -> None:
        """Raises the first error there was."""
        for error in self.missing.values():
            raise error


@dataclass(frozen=True, slots=True)
class _Entry:
    """A device as the database remembers it; its place in the list is its number."""

    name: str
    path: str
    kind: str


def open_storage(settings: Settings, memory: Collection[Path] = ()) -> Storage:
    """Lock the cache devices and open the database. `memory`: directories where commits may wait
    for a slow disk, if they are in memory. Raises CacheError."""
    given = _Given()
    try:
        for index, path in enumerate(settings.cache.dirs):
            try:
                given.devices.append(CacheDevice(index, path))
            except DeviceMissing as error:
                given.missing[str(Path(path).absolute())] = error
        if not given.devices:
            given.require_all()
        home = find_home(given.devices)
        if not _has_database(home):
            given.require_all()
            _refuse_left_over(given.devices)
        meta = open_meta(given.devices, memory, settings.cache.commit_patience)
        try:
            devices = _arrange(meta, given, home)
            return Storage(devices, _ledgers(settings, devices, meta, home), meta, home)
        except BaseException:
            meta.close()
            raise
    except BaseException:
        given.close()
        raise


# -- the database ---------------------------------------------------------------------------------


def find_home(devices: Sequence[CacheDevice]) -> CacheDevice:
    """The device that has the database, or that is to have it. Raises CacheError."""
    having = [device for device in devices if _has_database(device)]
    if len(having) > 1:
        places = " and ".join(str(device.directory) for device in having)
        raise CacheError(
            f"{places} belong to different caches: each has a database",
            hint="give this mount directories of one cache, or empty ones",
        )
    lasting = [device for device in devices if device.survives > Level.PROCESS]
    return next(iter([*having, *lasting, *devices]))


def _database(device: CacheDevice) -> Path:
    return device.meta_dir / "cachefs.db"


def check_versions(settings: Settings) -> None:
    """Raises CacheError if the database, which may be in use, is one that this code cannot open."""
    for directory in settings.cache.dirs:
        path = Path(directory) / "meta" / "cachefs.db"
        try:
            if path.exists():
                check_version(path)
        except SchemaTooNew as error:
            raise CacheError(str(error), hint=error.hint) from error


def _has_database(device: CacheDevice) -> bool:
    return _database(device).exists()


def _refuse_left_over(devices: Sequence[CacheDevice]) -> None:
    """A device that has a name and no database to know it is part of another cache."""
    for device in devices:
        files = next(device.list_generations(), None)
        if files is None and identity.read(device.directory) is not None:
            raise CacheError(
                f"{device.directory} belongs to a cache whose database is not here",
                hint="give all directories of that cache, or an empty one to begin a new cache",
            )


def open_meta(
    devices: Sequence[CacheDevice], memory: Collection[Path] = (), patience: float = PATIENCE
) -> Meta:
    """The database of a cache, made if the cache is new: never an empty one over files that are
    there. Raises CacheError."""
    home = find_home(devices)
    path = _database(home)
    waiting = next(memory_places(memory), None) if home.survives > Level.PROCESS else None
    is_new = all(next(device.list_generations(), None) is None for device in devices)
    try:
        meta = Meta(path, may_create=is_new, memory=waiting, patience=patience)
        if meta.db.lost_commits and not Reboots(meta).happened():
            raise Damaged(f"{path}-wal is damaged: {meta.db.lost_commits} changes are beyond reach")
        return meta
    except SchemaTooNew as error:
        raise CacheError(str(error), hint=error.hint) from error
    except (Damaged, sqlite3.DatabaseError) as error:
        if disk_error(error) is not None:
            raise _unreadable(path, error) from error
        what = str(error) if isinstance(error, Damaged) else f"{path} cannot be read: {error}"
        raise CacheError(
            what,
            hint="nothing was changed; `cachefs fsck CACHE_DIR --salvage DIR` writes out the files "
            "that are in the cache",
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CacheError:
    busy = isinstance(error, OSError) and error.errno == errno.EBUSY
    what = "end that program" if busy else "see the free space and the health of that disk"
    told = f"the metadata database {path} cannot be opened: {error}"
    return CacheError(told, hint=f"nothing was changed; {what}")


# -- which device is which ------------------------------------------------------------------------


def _arrange(meta: Meta, given: _Given, home: CacheDevice) -> list[CacheDevice]:
    """All devices by number, each with its number. Raises CacheError."""
    remembered = meta.setting(_DEVICES)
    if remembered is None:
        devices = _first_arrangement(meta, given, home)
    else:
        known = [_Entry(**each) for each in json.loads(remembered)]
        devices = _arrange_known(meta, known, given)
    for index, device in enumerate(devices):
        device.index = index
    _remember(meta, devices, remembered)
    return devices


def _first_arrangement(meta: Meta, given: _Given, home: CacheDevice) -> list[CacheDevice]:
    """Of a new cache, or one of an older version, whose database was on the first device."""
    given.require_all()
    used = meta.generations.devices()
    if not used:
        return list(given.devices)
    if given.devices[0] is not home and max(used) > 0:
        raise CacheError(
            f"an older version made this cache, with {home.directory} as its first directory",
            hint="mount it once with the same directories in the same order",
        )
    return [home, *(device for device in given.devices if device is not home)]


def _arrange_known(meta: Meta, known: Sequence[_Entry], given: _Given) -> list[CacheDevice]:
    names = {entry.name: index for index, entry in enumerate(known)}
    found: dict[int, CacheDevice] = {}
    strangers = []
    for device in given.devices:
        index = names.get(identity.read(device.directory) or "")
        if index is None:
            strangers.append(device)
        else:
            found[index] = device
    new: list[CacheDevice] = []
    empty: set[int] = set()
    used = meta.generations.devices()
    for device in strangers:
        index = _place_of(device, known, found)
        if index is None:
            new.append(device)
        elif known[index].kind != DeviceKind.RAM and index in used:
            empty.add(index)
            given.devices.remove(device)
            device.close()
        else:
            found[index] = device
    absent = (
        _absent(meta, index, entry, given, is_empty=index in empty)
        for index, entry in enumerate(known)
        if index not in found
    )
    found.update((device.index, device) for device in absent)
    return [*(found[index] for index in range(len(known))), *new]


def _place_of(
    device: CacheDevice, known: Sequence[_Entry], found: dict[int, CacheDevice]
) -> int | None:
    """The number of the device that was at the path of one that nobody knows. Raises CacheError."""
    if next(device.list_generations(), None) is not None:
        raise CacheError(
            f"{device.directory} belongs to another cache: it has cache files in it",
            hint="mount it with the directories of that cache, or give an empty one",
        )
    path = str(device.directory)
    places = (i for i, entry in enumerate(known) if i not in found and entry.path == path)
    return next(places, None)


def _absent(
    meta: Meta, index: int, entry: _Entry, given: _Given, *, is_empty: bool
) -> AbsentDevice:
    error = given.missing.get(entry.path)
    why = _EMPTY if is_empty else str(error) if error is not None else _NOT_GIVEN
    device = AbsentDevice(index, entry.name, entry.path, DeviceKind(entry.kind), why)
    device.retired = why == _NOT_GIVEN and not meta.generations.only_on(index)
    return device


def _remember(meta: Meta, devices: Sequence[CacheDevice], remembered: str | None) -> None:
    entries = []
    for device in devices:
        name = device.name if isinstance(device, AbsentDevice) else _name_of(device)
        entries.append(asdict(_Entry(name, str(device.directory), str(device.kind))))
    text = json.dumps(entries)
    if text != remembered:
        meta.set_setting(_DEVICES, text)
        try:
            meta.db.sync()  # Before there are files on a device that a power cut makes a stranger.
        except OSError as error:
            raise _unreadable(meta.db.path, error) from error


def _name_of(device: CacheDevice) -> str:
    try:
        return identity.read(device.directory) or identity.give(device.directory)
    except OSError as error:
        raise CacheError(f"{device.directory} cannot be written to: {error.strerror}") from error


# -- space ----------------------------------------------------------------------------------------


def _ledgers(
    settings: Settings, devices: list[CacheDevice], meta: Meta, home: CacheDevice
) -> list[SpaceLedger]:
    used = [device.allocated_total() for device in devices]
    size = settings.cache.size
    if size is None:
        remembered = meta.setting("cache_size")
        size = int(remembered) if remembered else None
    limits = resolve_limits(devices, size, used, set_aside=settings.cache.meta_reserve)
    if settings.cache.size is None:
        meta.set_setting("cache_size", str(sum(limits)))
    ledgers = []
    for device, limit, mine in zip(devices, limits, used, strict=True):
        ledger = SpaceLedger(
            device,
            limit,
            high=settings.cache.high_watermark,
            low=settings.cache.low_watermark,
            meta_reserve=settings.cache.meta_reserve if device is home else 0,
        )
        ledger.charge(mine)
        ledger.restore_reserve()
        ledgers.append(ledger)
    return ledgers
