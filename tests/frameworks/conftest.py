"""Training frameworks run in processes of their own, with the interpreter that has them.

PyTorch and safetensors are part of the tests' own environment (tests/frameworks.txt). The heavier
frameworks of tests/frameworks_all.txt have an environment of their own, `.venv-frameworks`, which
`bash tests/run.sh -m frameworks_all` makes.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client import Client

PYTHON = os.environ.get("CACHEFS_TEST_FRAMEWORKS_PYTHON", sys.executable)
"""An interpreter with the frameworks of tests/frameworks.txt installed."""
PYTHON_OF_ALL = Path(__file__).parents[2] / ".venv-frameworks/bin/python"
"""The interpreter with the frameworks of tests/frameworks_all.txt installed."""


@functools.cache
def installed(module: str) -> bool:
    """Whether the interpreter for frameworks can import a module."""
    command = [PYTHON, "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


@pytest.fixture
def framework() -> Iterator[Client]:
    """A client whose processes can import torch."""
    if not installed("torch"):
        pytest.skip("torch is not installed: pip install -r tests/frameworks.txt")
    client = Client(python=PYTHON, env={**os.environ, "OMP_NUM_THREADS": "1"})
    yield client
    client.close()


@pytest.fixture
def frameworks(home: Path) -> Iterator[Client]:
    """A client whose processes can import every framework; they use neither network nor GPU."""
    if not PYTHON_OF_ALL.exists():
        pytest.skip("frameworks are not installed: bash tests/run.sh -m frameworks_all")
    env = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    client = Client(python=str(PYTHON_OF_ALL), env=env)
    yield client
    client.close()
