"""What the demonstration prints suits a terminal and a log file."""

from __future__ import annotations

import io

from rich.console import Console

from cachefs.demo.screen import Screen
from cachefs.demo.watching import WATCH, worth_watching
from cachefs.observe.metrics import SPECS, Metrics, Snapshot


def output_of(*, terminal: bool) -> str:
    file = io.StringIO()
    screen = Screen(Console(file=file, force_terminal=terminal, width=100, markup=False))
    with screen.bars() as bars:
        for name in ("save", "upload"):
            with bars.phase(name, 1000) as set_done:
                for done in range(1001):
                    set_done(done)
    screen.table("Table", ("WHAT", ">VALUE"), [("[red]", "1")])
    screen.facts("Facts", [("[blue]", "2")])
    return file.getvalue()


def test_a_log_file_gets_one_line_a_phase() -> None:
    text = output_of(terminal=False)
    assert "\x1b" not in text
    assert text.count("100 %") == 2
    assert len(text.splitlines()) < 15  # a slow machine may add a line of progress now and then
    assert "[red]" in text
    assert "[blue]" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_terminal_gets_bars() -> None:
    assert "━" in output_of(terminal=True)


def test_every_metric_worth_watching_exists_and_is_shown() -> None:
    metrics = Metrics()
    metrics.set_snapshot(lambda: Snapshot(dirty_bytes=5, cache_used_bytes={"/c": 7, "/d": 5}))
    metrics.counter("cachefs_write_bytes_total", "tracked").inc(3)
    metrics.counter("cachefs_store_requests_total", "put", "ok").inc(2)
    metrics.counter("cachefs_store_requests_total", "list", "ok").inc(4)
    rows = {name: value for name, value, _ in worth_watching(metrics.render())}
    assert rows["cachefs_dirty_bytes"] == "5"
    assert rows["cachefs_cache_used_bytes"] == "12"
    assert rows["cachefs_store_requests_total{outcome=ok}"] == "6"
    assert rows["cachefs_write_bytes_total{lane=tracked}"] == "3"
    assert set(WATCH) <= set(SPECS)
