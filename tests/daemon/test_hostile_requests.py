"""Whatever is read from sockets, run files and damaged rows: an answer or an error on purpose."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cachefs.cache.device import CacheDevice
from cachefs.daemon.storage import open_meta
from cachefs.errors import CachefsError
from cachefs.fsck.check import check
from cachefs.fsck.salvage import salvage
from cachefs.observe import runfiles
from cachefs.observe.protocol import decode
from tests.daemon.lab import MOUNTPOINT, Lab, lab
from tests.fsck.cache import BODIES, Cache
from tests.support import scratch

QUICK = settings(
    max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
BELOW = [f"{MOUNTPOINT}{each}" for each in ("", "/f", "/d/../..", "/\0", "//f/.", "/" + "n" * 300)]
words = st.sampled_from(
    [*BELOW, "/", "", "..", "\0", "\ud800", "keep", "discard", "site"]
) | st.text(max_size=9)
numbers = st.integers() | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=2),
    max_leaves=6,
)
names = st.sampled_from(
    ["path", "paths", "timeout", "survives", "decision", "show", "source", "drain_timeout", "x"]
)
ENDING = {"unmount", "upgrade"}


async def _ask(made: Lab, op: str, args: dict[str, Any]) -> None:
    async def progress(values: Mapping[str, Any], /) -> None:
        json.dumps(values)

    with trio.move_on_after(0.05):
        try:
            json.dumps(await made.handlers[op](args, progress))
        except* CachefsError:
            pass


@QUICK
@given(
    requests=st.lists(
        st.tuples(st.integers(0), st.dictionaries(names, values, max_size=4)), max_size=25
    )
)
def test_requests_of_any_shape(requests: list[tuple[int, dict[str, Any]]]) -> None:
    """Nothing but errors on purpose comes out of a handler."""

    async def main() -> None:
        with scratch.directory("/dev/shm") as place:
            async with lab(place) as made:
                await made.write("f", b"content")
                ops = sorted(made.handlers.keys() - ENDING)
                for number, args in requests:
                    await _ask(made, ops[number % len(ops)], args)
                assert made.services.meta.dentries.get(1, b"f") is not None

    trio.run(main)


def _as_sent(value: object) -> bytes:
    return str(value).encode(errors="surrogatepass")


@QUICK
@given(line=st.binary(max_size=300) | st.just(b"[" * 100_000) | values.map(_as_sent))
def test_lines_of_any_shape(line: bytes) -> None:
    try:
        assert isinstance(decode(line), dict)
    except ValueError:
        pass


FIELDS = ("mountpoint", "pid", "supervisor_pid", "socket", "cache_dirs", "log", "x")
fields = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, values))


@QUICK
@given(body=st.binary(max_size=100) | fields.map(lambda v: json.dumps(v).encode()) | st.just(b"["))
def test_run_files_of_any_shape(body: bytes) -> None:
    """A run file is what it should be, or it is none."""
    with scratch.directory("/dev/shm") as place:
        path = place / "x.json"
        path.write_bytes(body)
        run = runfiles._load(path)
        if run is not None:
            texts = (run.mountpoint, run.socket, run.log, *run.cache_dirs)
            assert all(isinstance(each, str) for each in texts)
            assert all(type(each) is int for each in (run.pid, run.supervisor_pid))


def _spoil_rows(cache: Cache, chance: random.Random) -> None:
    """Cells get values that they should not have, as a broken program would leave them."""
    db = sqlite3.connect(cache.database, isolation_level=None)
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type='table'")]
    odd = [
        None,
        0,
        -1,
        1,
        2,
        3,
        7,
        2**62,
        -(2**63),
        "",
        "held",
        "publish",
        b"",
        b"\xff",
        "x/y",
        0.5,
    ]
    for _ in range(chance.randint(1, 6)):
        table = chance.choice(tables)
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        rows = db.execute(f"SELECT * FROM {table}").fetchall()
        if not rows:
            continue
        row, column = chance.choice(rows), chance.choice(columns)
        try:
            db.execute(
                f'UPDATE {table} SET "{column}"=? WHERE "{columns[0]}" IS ?',
                (chance.choice(odd), row[0]),
            )
        except (sqlite3.IntegrityError, sqlite3.OperationalError):
            continue  # SQLite itself does not have it.
    db.close()


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_any_content(tmp_path: Path, seed: int) -> None:
    """The check finds its way, mending ends, nothing is lost, and a daemon gets on or says no."""
    cache = Cache(tmp_path / "cache")
    _spoil_rows(cache, random.Random(seed))
    check([cache.directory])
    salvage([cache.directory], tmp_path / "out")
    check([cache.directory], repair=True)
    assert set(BODIES.values()) <= cache.every_byte()
    device = CacheDevice(0, cache.directory)
    try:
        open_meta([device]).close()
    except CachefsError as error:
        assert "\n" not in str(error)
    finally:
        device.close()
