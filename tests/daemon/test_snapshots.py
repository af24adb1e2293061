"""The gauges: taken on the trio thread, handed to the endpoint's."""

from __future__ import annotations

import threading
import time

import trio

from cachefs.daemon.handlers import refresh_snapshot
from cachefs.errors import Refused
from tests.daemon.lab import Lab, fails, in_lab, until


async def _page(lab: Lab) -> dict[str, float]:
    """Scraped from another thread, as Prometheus does."""
    text = await trio.to_thread.run_sync(lab.services.metrics.render)
    lines = (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in lines}


@in_lab()
async def test_a_scrape_sees_the_present(lab: Lab) -> None:
    lab.nursery.start_soon(refresh_snapshot, lab.services)
    await trio.sleep(0.01)
    await lab.write("d/f.bin", b"x" * 5000)
    await lab.write("d/latest", b"x")
    page = await _page(lab)
    assert page["cachefs_dirty_bytes"] == 5001
    assert page["cachefs_dirty_files"] == 2
    assert page["cachefs_oldest_dirty_seconds"] > 0
    assert page['cachefs_effects_pending{class="data"}'] == 1
    assert page['cachefs_effects_pending{class="barrier"}'] == 1
    assert page["cachefs_takeovers_total"] == 2
    assert page["cachefs_degraded"] == 0
    cache = str(lab.services.devices[0].directory)
    assert page[f'cachefs_cache_size_bytes{{device="{cache}"}}'] == 256 << 20
    assert page[f'cachefs_cache_used_bytes{{device="{cache}"}}'] > 0
    await lab.wait()
    assert (await _page(lab))["cachefs_dirty_bytes"] == 0


@in_lab()
async def test_what_is_stuck_is_counted(lab: Lab) -> None:
    lab.nursery.start_soon(refresh_snapshot, lab.services)
    lab.bucket.refused["s.bin"] = Refused("403")
    await lab.write("s.bin")
    await lab.write("latest")
    await lab.write("fine.bin")
    await fails(lab.wait("s.bin"), 5)
    page = await _page(lab)
    assert page["cachefs_stalled_files"] == 1
    assert page["cachefs_effects_blocked"] == 1


@in_lab()
async def test_a_busy_daemon_gives_the_last_numbers(lab: Lab) -> None:
    lab.nursery.start_soon(refresh_snapshot, lab.services)
    await trio.sleep(0.01)
    await lab.write("f.bin")
    started = threading.Event()

    def scrape() -> str:
        started.set()
        time.sleep(0.05)
        return lab.services.metrics.render()

    async def in_thread() -> str:
        return await trio.to_thread.run_sync(scrape)

    page = lab.asking(in_thread)
    await until(started.is_set)
    time.sleep(0.8)  # noqa: ASYNC251
    assert "cachefs_dirty_files 0.0" in await page


@in_lab()
async def test_numbers_that_cannot_be_had_cost_nothing_else(lab: Lab) -> None:
    lab.services.takeovers = lambda: 1 // 0
    lab.nursery.start_soon(refresh_snapshot, lab.services)
    await trio.sleep(0.01)
    assert (await _page(lab))["cachefs_dirty_files"] == 0
    await lab.write("f.bin")
    await lab.wait()
