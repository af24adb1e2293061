"""How far fetching and evicting have come is told while they go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon.lab import Lab, in_lab


@pytest.mark.parametrize("verb", ["evict", "warm"])
def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr("cachefs.daemon.holding._TICK", 0.0)

    @in_lab()
    async def test(lab: Lab) -> None:
        for number in range(4):
            await lab.write(f"d/{number}", bytes(100_000))
        await lab.wait()
        if verb == "warm":
            await lab.ask("evict", paths=["d"])
        lab.progress.clear()
        assert (await lab.ask(verb, paths=["d"]))["files"] == 4
        first = {"files_total": 4, "files_left": 4, "bytes_total": 400_000, "bytes_left": 400_000}
        assert lab.progress[0] == first
        left = [each["bytes_left"] for each in lab.progress]
        assert left == sorted(left, reverse=True)
        assert min(left) < 400_000

    test(tmp_path)
