"""A TensorBoard writer that stays open for the whole run; its event file grows in the bucket."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.checks import assert_mirrored
from tests.support.client import Client
from tests.support.mounts import MountFactory, poll

pytestmark = [pytest.mark.frameworks, pytest.mark.frameworks_all, pytest.mark.timeout(200)]

_STEPS = 120


def _log(folder: str, steps: int) -> None:
    """A run that logs a scalar and a histogram every 100 ms; the file is closed at its end."""
    import torch
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder, flush_secs=1) as writer:
        for step in range(steps):
            writer.add_scalar("loss", 1 / (step + 1), step)
            writer.add_histogram("weights", torch.arange(step + 10.0), step)
            time.sleep(0.1)


def _read(folder: str) -> list[int]:
    """The steps of the scalar that TensorBoard itself finds in a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder)
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


def test_summary_writer(
    mounted: MountFactory, bucket: Any, frameworks: Client, disk_dir: Path
) -> None:
    """Several times during the run a reader of the bucket sees more of it, never torn."""
    mount = mounted(bucket, options={"flush.open_file_interval": "500ms"})
    run = frameworks.start(_log, mount.path / "logs", _STEPS)
    seen: list[bytes] = []

    def grown() -> bool:
        for key in bucket.keys():  # noqa: SIM118
            body = bucket.get(key)
            if len(body) > len(seen[-1] if seen else b""):
                seen.append(body)
        return run.process.poll() is not None

    poll(grown, 120, step=0.3, what="the end of the run")
    run.result()
    assert len(seen) >= 4
    assert all(after.startswith(before) for before, after in itertools.pairwise(seen))
    (disk_dir / "events.out.tfevents.halfway").write_bytes(seen[len(seen) // 2])
    halfway = frameworks.run(_read, disk_dir, timeout=60)
    assert halfway == list(range(len(halfway))) and 0 < len(halfway) < _STEPS
    assert_mirrored(mount, bucket, frameworks)
    assert frameworks.run(_read, mount.path / "logs", timeout=60) == list(range(_STEPS))
