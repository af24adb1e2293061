"""What probes that were interrupted left in the store is found and removed, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachefs.flush import remains
from cachefs.flush.remains import ABANDONED
from tests.flush.conftest import Place
from tests.flush.world import PREFIX, now_ns, run

OURS, THEIRS = ".cachefs/probe-ours-1", ".cachefs/probe-theirs-1"
OTHERS = (".cachefs/spans/ours/1", "data", "probe-ours-1")


def leave(place: Place, age: float) -> None:
    """An object and an upload under each of the keys, `age` seconds old."""
    for key in (OURS, THEIRS, *OTHERS):
        place.store.put(PREFIX + key, b"a probe")
        place.store.create_upload(PREFIX + key)
    made = now_ns() - int(age * 1e9)
    for key, stored in place.store.objects.items():
        place.store.objects[key] = replace(stored, stamp=made)
    for upload in place.store.uploads.values():
        upload.started_ns = made


@pytest.mark.parametrize(
    ("age", "left"), [(0.0, {THEIRS, *OTHERS}), (ABANDONED + 1, set(OTHERS))], ids=["new", "old"]
)
def test_our_own_go_at_once_those_of_others_when_they_are_old(
    place: Place, age: float, left: set[str]
) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            leave(place, age)
            await remains.remove(world.client, "ours")
            uploads = {upload.key for upload in place.store.uploads.values()}
            assert set(place.store.objects) == uploads == {PREFIX + key for key in left}

    run(main)
