"""The daemon is killed at each failpoint: what it had said is true, what it had not is whole."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.points import all_points
from tests.crash.scenes import SCENES, Scene
from tests.crash.theatre import KILLED, Stages, judge, play
from tests.support import scratch

pytestmark = pytest.mark.slow

KINDS = ("kill", "kill twice", "kill in recovery")
RECOVERY = [
    *("RECOVER_BEFORE_COMMIT", "RECOVER_AFTER_COMMIT", "RECOVER_AFTER_REMEMBER"),
    *("RECOVER_AFTER_SNAPSHOTS", "RECOVER_AFTER_OPEN", "RECOVER_AFTER_UNLINKED"),
    *("RECOVER_AFTER_FILES", "DATABASE_AFTER_OPEN"),
]
SAMPLE = 8
"""Points that are tried by default, in each of the three ways; `-m soak` tries all."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a point is reached: in which life of which scene."""

    scene: Scene
    life: int


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with scratch.directory("/dev/shm", "crash") as made:
        yield made


@pytest.fixture(scope="module")
def stages(folder: Path) -> Iterator[Stages]:
    made = Stages(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ways(stages: Stages, folder: Path) -> dict[str, list[Way]]:
    """Point -> the ways there, the surest first: all scenes are played, to see which they reach."""
    found: dict[str, list[tuple[float, Way]]] = defaultdict(list)
    for scene in SCENES:
        for life in range(len(scene.lives)):
            begun, record = time.monotonic(), folder / "record"
            record.unlink(missing_ok=True)
            plans = [{"action": "record", "file": str(record)}]
            played = play(stages, scene, folder / "played", plans, life)
            assert set(played.statuses) == {0}, f"{scene.name}: {stages.errors()}"
            wrong = judge(folder / "played", played, scene.forgiving)
            assert not wrong, f"{scene.name}, not killed: {wrong}"
            hits = Counter(record.read_text().split() if record.exists() else ())
            for point, count in hits.items():
                cost = (time.monotonic() - begun) / min(count, 3)
                found[point].append((cost, Way(scene, life)))
    return {
        point: [way for _, way in sorted(each, key=lambda pair: pair[0])]
        for point, each in found.items()
    }


def plans_for(point: str, kind: str, turn: int) -> list[dict[str, Any]]:
    plans = [{"action": "kill", "point": point}]
    if kind == "kill twice":
        plans *= 2
    elif kind == "kill in recovery":
        plans.append({"action": "kill", "point": RECOVERY[turn % len(RECOVERY)]})
    return plans


def kill_at(points: list[str], ways: dict[str, list[Way]], stages: Stages, folder: Path) -> None:
    told: Counter[str] = Counter()
    wrong = []
    for turn, (point, kind) in enumerate(itertools.product(points, KINDS)):
        for way in ways[point]:  # what other tasks do may come too late for a scene
            played = play(
                stages, way.scene, folder / "played", plans_for(point, kind, turn), way.life,
                goes_on=kind == "kill twice",
            )  # fmt: skip
            if KILLED in played.statuses:
                break
        told[kind] += 1
        told["deaths"] += played.statuses.count(KILLED)
        found = judge(folder / "played", played, way.scene.forgiving)
        if KILLED not in played.statuses or set(played.statuses) - {0, KILLED}:
            found.append(f"the daemons ended with {played.statuses}: {stages.errors()}")
        wrong += [f"{point}, {kind} ({way.scene.name}): {each}" for each in found]
    print(f"{len(points)} of {len(all_points())} points:", dict(told))
    assert not wrong, "\n".join(wrong)


def test_every_point_is_reached(ways: dict[str, list[Way]]) -> None:
    print(f"{len(ways)} points are reached by {len(SCENES)} scenes")
    assert set(all_points()) - ways.keys() == set()


def test_killed_at_some(ways: dict[str, list[Way]], stages: Stages, folder: Path) -> None:
    """Others each time; CACHEFS_TEST_SEED chooses the same again."""
    seed = int(os.environ.get("CACHEFS_TEST_SEED", random.randrange(10**6)))
    print(f"CACHEFS_TEST_SEED={seed}")
    kill_at(random.Random(seed).sample(sorted(ways), SAMPLE), ways, stages, folder)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_killed_at_each(ways: dict[str, list[Way]], stages: Stages, folder: Path) -> None:
    kill_at(sorted(ways), ways, stages, folder)
