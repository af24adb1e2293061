"""Orbax saves and restores through the mount, in the foreground and in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.frameworks.checks import assert_mirrored, first_names
from tests.support.client import Client
from tests.support.mounts import MountFactory

pytestmark = [pytest.mark.frameworks, pytest.mark.frameworks_all, pytest.mark.timeout(300)]


def _state(step: int) -> Any:
    """A tree of arrays of several types."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(step)
    return {
        "params": {"kernel": jax.random.normal(key, (300, 500)), "bias": jnp.ones(500) * step},
        "half": jax.random.normal(key, (64, 64), dtype=jnp.bfloat16),
        "step": jnp.int32(step),
    }


def _save(folder: str, asynchronous: bool) -> list[int]:
    """Save six steps, of which two are kept; which there are."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=asynchronous)
    with ocp.CheckpointManager(folder, options=options) as manager:
        for step in range(6):
            manager.save(step, args=ocp.args.StandardSave(_state(step)))
        manager.wait_until_finished()
        return list(manager.all_steps())


def _restores(folder: str) -> list[int]:
    """The steps that are restored exactly as they were saved."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    good = []
    with ocp.CheckpointManager(folder) as manager:
        for step in manager.all_steps():
            wanted = _state(step)
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
            found = manager.restore(step, args=ocp.args.StandardRestore(shapes))
            if jax.tree.all(jax.tree.map(jnp.array_equal, wanted, found)):
                good.append(step)
    return good


HELPERS: list[Callable[..., Any]] = [_state]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_checkpoint_manager(
    mounted: MountFactory, bucket: Any, frameworks: Client, asynchronous: bool
) -> None:
    """Its temporary directories never show; what is kept is restored by another machine."""
    mount = mounted(bucket)
    run = mount.path / "run"
    assert frameworks.run(_save, run, asynchronous, helpers=HELPERS, timeout=120) == [4, 5]
    assert frameworks.run(_restores, run, helpers=HELPERS, timeout=120) == [4, 5]
    assert_mirrored(mount, bucket, frameworks)
    assert first_names(bucket.below("run")) == ["4", "5"]
    assert mount.unmount() == 0
    cold = mounted(bucket)
    assert frameworks.run(_restores, cold.path / "run", helpers=HELPERS, timeout=120) == [4, 5]
