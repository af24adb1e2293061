"""Who tells whom, of those that make room for files that are being written."""

from __future__ import annotations

from cachefs.daemon.session import StoreSession
from cachefs.fuse.lanes import PassthroughLanes
from cachefs.observe.metrics import Metrics
from cachefs.vfs.files import Files
from cachefs.vfs.lanes import LaneKeeper
from cachefs.vfs.offloading import Offloader
from cachefs.vfs.opened import OpenInode
from cachefs.vfs.spilling import Spiller


def connect_spiller(spiller: Spiller, files: Files, lanes: LaneKeeper, metrics: Metrics) -> None:
    """Tell those who have to know of it."""

    def ask_always(opened: OpenInode) -> None:
        files.note_changes()
        for handle in files.table.handles_of(opened):
            lanes.withdraw(handle)

    def ask_less(opened: OpenInode) -> None:
        for handle in files.table.handles_of(opened):
            lanes.moved(handle)

    spiller.before_move, spiller.after_move = ask_always, ask_less
    spiller.on_spilled = metrics.counter("cachefs_spilled_bytes_total").inc
    if spiller.active:
        files.shelter = spiller.shelter
        files.admission.move_away = spiller.move_open
        files.must_move = spiller.must_flee
    if isinstance(lanes, PassthroughLanes):
        lanes.volatile = spiller.volatile


def connect_offloader(
    offloader: Offloader, files: Files, spiller: Spiller, session: StoreSession, metrics: Metrics
) -> None:
    """Tell those who have to know of it."""
    files.admission.on_waiting, files.admission.is_made = offloader.kick, offloader.makes_room
    offloader.roomier, offloader.move_on = spiller.roomier, spiller.move_on
    offloader.note_changes = files.note_changes
    offloader.can_copy = lambda: session.capabilities.copy_part if session.capabilities else None
    offloader.on_offloaded = metrics.counter("cachefs_offloaded_bytes_total").inc
