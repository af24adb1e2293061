"""The tap's C code against a model of the kernel, under sanitizers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Harness = Callable[[str], Path]
MEMORY = "address,undefined"


def run(program: Path, *args: object) -> str:
    done = subprocess.run(
        [program, *map(str, args)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [1, 2])
def test_tables_agree_with_arrays(harness: Harness, seed: int) -> None:
    run(harness(MEMORY), "tables", seed, 50_000)


@pytest.mark.parametrize("sanitizers", [MEMORY, "thread"])
def test_malformed_messages_do_no_harm(harness: Harness, sanitizers: str) -> None:
    run(harness(sanitizers), "malformed", 3, 20_000)


def test_names_of_all_kinds_do_no_harm(harness: Harness) -> None:
    """Each request is answered once, and what was made without Python is in the journal."""
    run(harness(MEMORY), "names", 1, 20_000)


def test_a_paused_tap_notices_the_end_of_its_mount(harness: Harness) -> None:
    run(harness(MEMORY), "paused", 1, 0)


def test_more_fallocates_than_there_is_room_for(harness: Harness) -> None:
    """Are to be made again, as after a signal; takeovers know of all others."""
    run(harness(MEMORY), "crowd", 1, 0)


@pytest.mark.parametrize("sanitizers", [MEMORY, "thread"])
def test_a_slow_disk_holds_up_its_writers_alone(harness: Harness, sanitizers: str) -> None:
    """Each request is answered once, and the bytes are right, whoever wrote them."""
    run(harness(sanitizers), "stalls", 6, 3000)


@pytest.mark.parametrize("sanitizers", [MEMORY, "thread"])
def test_several_writers_write_at_once(harness: Harness, sanitizers: str) -> None:
    """None waits for all others, as few as are allowed at a time, and the bytes are right."""
    run(harness(sanitizers), "ranks", 7, 300)


def test_kills_under_a_memory_checker(harness: Harness) -> None:
    run(harness(MEMORY), "kills", 4, 50)


@pytest.mark.parametrize("kills", [200, pytest.param(500, marks=pytest.mark.soak)])
def test_no_kill_confuses_the_handle_table_or_leaks_an_id(harness: Harness, kills: int) -> None:
    """Handles and backing ids against the kernel's own view after each kill, some of them during
    the takeover from the one before."""
    out = run(harness(""), "kills", 5, kills)
    print(out)
    assert f"{kills} kills" in out
