"""Scripts, units and examples that ship beside the package agree with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from cachefs import config
from cachefs.observe.metrics import SPECS

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "deploy" / "etc" / "example.toml"
SCRIPTS = ("deploy/lib.sh", "deploy/quickstart.sh", "tests/run.sh", "tests/fresh.sh", ".ci/run")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def quickstart(*prefix: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, "bash", str(ROOT / "deploy" / "quickstart.sh")],
        capture_output=True,
        text=True,
        env={"PATH": path},
        timeout=30,
    )


def test_quickstart_as_another_user_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = quickstart(path=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"cachefs: must run as root: .*\n", done.stderr)


def test_quickstart_without_fuse_is_one_clear_line() -> None:
    hide = 'mount -t tmpfs none /dev && exec "$@"'
    done = quickstart("unshare", "--mount", "sh", "-c", hide, "sh")
    assert done.returncode == 1
    assert re.fullmatch(r"cachefs: /dev/fuse is missing: .*\n", done.stderr)


def test_example_configuration_loads(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("/var/cache", str(tmp_path))
    example = tmp_path / "example.toml"
    example.write_text(text)
    settings = config.load(str(example), (), flags={"store.url": "s3://bucket/prefix"})
    assert settings.flush.drain_timeout == 14 * 60


def test_example_configuration_with_every_line_taken_in_loads(tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().replace("/var/cache", str(tmp_path)).splitlines()
    example = tmp_path / "example.toml"
    example.write_text("\n".join(re.sub(r"^#(\w+ = )", r"\1", line) for line in lines))
    assert tomllib.loads(example.read_text())["cache"]["size"] == "500GiB"
    settings = config.load(str(example), (), flags={"store.url": "s3://bucket/prefix"})
    assert {"my_marker", "_SUCCESS"} <= set(settings.order.barrier)


def test_unit_is_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (ROOT / "systemd" / "cachefs@.service").read_text()
    file = tmp_path / "cachefs@.service"
    file.write_text(unit.replace("/opt/cachefs/bin/cachefs", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "cachefs@example.service"],
        capture_output=True,
        text=True,
    )
    assert "cachefs@" not in done.stderr
    if not done.stderr:
        assert done.returncode == 0


def test_unit_gives_the_drain_more_time_than_the_example_does() -> None:
    unit = (ROOT / "systemd" / "cachefs@.service").read_text()
    found = re.search(r"^TimeoutStopSec=(\w+)$", unit, re.MULTILINE)
    assert found
    drain = tomllib.loads(EXAMPLE.read_text())["flush"]["drain_timeout"]
    limit, allowed = config.parse_duration(found[1]), config.parse_duration(drain)
    assert isinstance(limit, float)
    assert isinstance(allowed, float)
    assert limit > allowed


@pytest.mark.parametrize("name", ["alerts.yaml", "grafana.json"])
def test_alerts_and_dashboard_use_metrics_that_exist(name: str) -> None:
    text = (ROOT / "deploy" / "observability" / name).read_text()
    used = set(re.findall(r"\bcachefs_\w+", text))
    assert used
    known = SPECS.keys() | {f"{spec.name}_bucket" for spec in SPECS.values() if spec.buckets}
    assert used <= known


def test_dashboard_panels_do_not_overlap() -> None:
    dashboard = json.loads((ROOT / "deploy" / "observability" / "grafana.json").read_text())
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
