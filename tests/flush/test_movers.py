"""Movers: jobs out, results back, whatever happens to the processes in between."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.errors import CacheError, CacheFileLost, NotFound, Refused, Transient, UsageError
from cachefs.flush.movers import MoverPool, open_movers
from cachefs.store.base import FileRange


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a store."""
    path = tmp_path / "root"
    path.mkdir()
    return path


@asynccontextmanager
async def pool_of(root: Path, processes: int = 1, threads: int = 2) -> AsyncIterator[MoverPool]:
    """Movers of a directory store."""
    async with open_movers({"url": root.as_uri()}, processes, threads) as pool:
        yield pool


def run(test: Callable[[], Coroutine[Any, Any, None]], seconds: float = 30) -> None:
    """Run a trio test with a time limit."""

    async def limited() -> None:
        with trio.fail_after(seconds):
            await test()

    trio.run(limited)


class Gate:
    """A file whose opening blocks until `open` is called: keeps a mover's thread busy."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"gate{secrets.token_hex(4)}"
        os.mkfifo(self.path)
        self._fd = -1

    @property
    def body(self) -> FileRange:
        """A body that cannot be read before; then it fails."""
        return FileRange(str(self.path), 0, 1)

    def open(self) -> None:
        """Let everybody through, now and later."""
        self._fd = os.open(self.path, os.O_RDWR)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something becomes true."""
    while not condition():  # noqa: ASYNC110  # other processes make it true
        await trio.sleep(0.01)


async def put_through(pool: MoverPool, gate: Gate) -> None:
    """A job that lasts until the gate opens."""
    with contextlib.suppress(CacheError, Transient):
        await pool.call("put", key="gated", body=gate.body)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_any_method_by_name(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root) as pool:
            body = root.parent / "body"
            body.write_bytes(b"0123456789")
            made = await pool.call("put", key="a/k", body=FileRange(str(body), 2, 8))
            assert (made.size, await pool.call("get_bytes", key="a/k")) == (6, b"234567")
            assert [o.key for o in (await pool.call("list", prefix="")).objects] == ["a/k"]
            upload = await pool.call("create_upload", key="m", metadata={"a": "b"})
            part = await pool.call(
                "upload_part", key="m", upload_id=upload, number=1, body=FileRange(str(body), 0, 10)
            )
            await pool.call("complete_upload", key="m", upload_id=upload, parts=[part])
            assert (await pool.call("head", key="m")).metadata == {"a": "b"}
            assert await pool.call("delete", keys=["m"]) == {}

    run(test)


def test_errors_keep_their_class_and_message(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root) as pool:
            with pytest.raises(NotFound, match="no such object"):
                await pool.call("head", key="missing")
            with pytest.raises(CacheFileLost, match="gone"):
                await pool.call("put", key="k", body=FileRange("/nowhere", 0, 1))
            with pytest.raises(Refused) as caught:
                await pool.call("put", key="../k", body=b"")
            assert "\n" not in caught.value.message

    run(test)


def test_bugs_come_back_as_errors_and_the_mover_lives(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with pool_of(root) as pool:
            await pool.call("probe")
            (pid,) = pool.pids
            with pytest.raises(Transient, match="internal error: TypeError"):
                await pool.call("head", nonsense=1)
            with pytest.raises(Transient, match="internal error: AttributeError"):
                await pool.call("no_such_method")
            with pytest.raises(NotFound):
                await pool.call("head", key="missing")
            assert pool.pids == [pid]

    run(test)
    assert "Traceback" in capfd.readouterr().err


def test_a_result_that_cannot_be_sent_is_an_error(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root) as pool:
            with pytest.raises(Transient, match="internal error"):
                await pool.call("_operation", verb="x", key="y")

    run(test)


def test_a_store_that_cannot_be_opened_is_reported_by_each_job() -> None:
    async def test() -> None:
        async with open_movers({"url": "ftp://nowhere"}, 1, 1) as pool:
            for _ in range(2):
                with pytest.raises(UsageError, match="ftp"):
                    await pool.call("head", key="k")
            assert pool.restarts == 0

    run(test)


def test_many_concurrent_jobs_use_all_movers(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root, processes=3, threads=4) as pool:
            infos: list[Any] = []

            async def put(number: int) -> None:
                infos.append(await pool.call("put", key=f"k{number}", body=b"%d" % number))

            async with trio.open_nursery() as nursery:
                for number in range(300):
                    nursery.start_soon(put, number)
                await until(lambda: all(m.load(True) for m in pool._movers) or len(infos) > 250)
                assert len(infos) <= 250, "all movers were given work"
            assert {info.key for info in infos} == {f"k{number}" for number in range(300)}
            assert pool.pending == 0

    run(test)


def test_jobs_go_to_the_mover_with_least_to_do(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root, processes=2, threads=3) as pool, trio.open_nursery() as nursery:
            await until(lambda: len(pool.pids) == 2)
            gates = [Gate(root.parent) for _ in range(4)]
            for gate in gates:
                nursery.start_soon(put_through, pool, gate)
            await until(lambda: pool.pending == 4)
            assert [mover.load(True) for mover in pool._movers] == [2, 2]
            for gate in gates:
                gate.open()

    run(test)


def test_reads_do_not_wait_behind_uploads(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root, threads=2) as pool, trio.open_nursery() as nursery:
            await pool.call("put", key="k", body=b"content")
            gates = [Gate(root.parent) for _ in range(4)]
            for gate in gates:
                nursery.start_soon(put_through, pool, gate)
            await until(lambda: pool.pending == 4)
            with trio.fail_after(5):
                assert await pool.call("get_bytes", key="k") == b"content"
            nursery.cancel_scope.cancel()
            for gate in gates:
                gate.open()

    run(test)


def test_a_killed_mover_is_replaced_and_its_jobs_done(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root, processes=2, threads=4) as pool:
            results: list[Any] = []

            async def put(number: int) -> None:
                results.append(await pool.call("put", key=f"k{number}", body=b"x" * 1000))

            async with trio.open_nursery() as nursery:
                for number in range(400):
                    nursery.start_soon(put, number)
                for enough in (20, 60):  # A third death could be that of one job (MAX_TRIES).
                    await until(lambda enough=enough: len(results) >= enough)  # type: ignore[misc]
                    os.kill(pool.pids[0], signal.SIGKILL)
            assert len(results) == 400
            assert pool.restarts >= 1
        assert len(list(root.glob("k*"))) == 400

    run(test)


def test_a_job_that_kills_its_movers_fails_in_the_end(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root) as pool:
            gate = Gate(root.parent)

            async def killer() -> None:
                while True:
                    await until(lambda: any(mover.tasks for mover in pool._movers))
                    os.kill(pool.pids[0], signal.SIGKILL)
                    await trio.sleep(0.02)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(killer)
                with pytest.raises(Transient, match="movers died"):
                    await pool.call("put", key="k", body=gate.body)
                nursery.cancel_scope.cancel()
            assert await pool.call("list", prefix="k")

    run(test)


def test_cancelling_a_call_stops_the_transfer(root: Path) -> None:
    big = root.parent / "big"
    with open(big, "wb") as file:
        file.truncate(64 << 30)  # sparse: takes many seconds to read

    async def test() -> None:
        async with pool_of(root, threads=1) as pool:
            with trio.move_on_after(0.5) as scope:
                await pool.call("put", key="k", body=FileRange(str(big), 0, 64 << 30))
            assert scope.cancelled_caught
            with trio.fail_after(5):
                await pool.call("put", key="other", body=b"goes on")
            assert (await pool.call("list", prefix="")).objects[0].key == "other"
            assert pool.restarts == 0
        assert list((root / ".cachefs/store/tmp").iterdir()) == []

    run(test)


def test_cancelling_a_job_that_waits(root: Path) -> None:
    async def test() -> None:
        gate = Gate(root.parent)
        async with pool_of(root, threads=1) as pool, trio.open_nursery() as nursery:
            nursery.start_soon(put_through, pool, gate)
            await until(lambda: pool.pending == 1)
            with trio.move_on_after(0.1):
                await pool.call("put", key="never", body=b"")
            assert pool.pending == 1
            gate.open()
        assert not (root / "never").exists()

    run(test)


def test_leaving_ends_the_movers_at_once_even_when_they_are_busy(root: Path) -> None:
    pids: list[int] = []

    async def test() -> None:
        gate = Gate(root.parent)
        async with trio.open_nursery() as outer:
            async with pool_of(root, processes=2) as pool:
                outer.start_soon(put_through, pool, gate)
                await until(lambda: len(pool.pids) == 2 and pool.pending == 1)
                pids.extend(pool.pids)
                started = time.monotonic()
            assert time.monotonic() - started < 2
            with pytest.raises(Transient, match="shut down"):
                await pool.call("head", key="k")

    run(test)
    assert not any(alive(pid) for pid in pids)


def test_signals_for_the_whole_group_leave_the_movers_alone(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root) as pool:
            await pool.call("probe")
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pool.pids[0], number)
            await pool.call("put", key="k", body=b"")
            assert pool.restarts == 0

    run(test)


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_movers_die_with_their_parent(root: Path, how: str) -> None:
    script = f"""
        import os, signal, sys, trio
        from cachefs.flush.movers import open_movers
        async def main():
            async with open_movers({{"url": {root.as_uri()!r}}}, 2, 2) as pool:
                await pool.call("probe")
                print(*pool.pids, flush=True)
                if {how!r} == "exit":
                    os._exit(0)
                await trio.sleep_forever()
        trio.run(main)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def test_movers_inherit_no_descriptors(root: Path) -> None:
    async def test() -> None:
        with open(root.parent / "secret", "w") as held:
            os.set_inheritable(held.fileno(), True)
            async with pool_of(root) as pool:
                await pool.call("probe")
                fds = Path(f"/proc/{pool.pids[0]}/fd")
                targets = {os.readlink(fd) for fd in fds.iterdir()}
                assert held.name not in targets
                assert sum(target.startswith("socket:") for target in targets) == 1

    run(test)


def test_a_probe_serves_all_movers_and_those_to_come(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root, processes=2) as pool:
            found = await pool.call("probe")
            assert pool._settings["capabilities"] == found
            await pool.restart_clients()
            assert await pool.call("probe") == found

    run(test)


def test_the_daemons_side_does_not_import_boto3() -> None:
    code = "import sys, cachefs.flush.movers; sys.exit(bool({'boto3', 'awscrt'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_thousand_small_jobs_are_quick(root: Path) -> None:
    async def test() -> None:
        async with pool_of(root, processes=1, threads=4) as pool:
            await pool.call("put", key="k", body=b"")
            started = time.monotonic()
            for _ in range(200):
                await pool.call("head", key="k")
            assert (time.monotonic() - started) / 200 < 0.005

    run(test)
