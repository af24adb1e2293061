"""How a limit on bandwidth is written, and what is said about mistakes in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachefs.config import Settings, load
from cachefs.errors import ConfigError
from cachefs.model.bandwidth import BandwidthPlan, Window

MIB = 1 << 20
STORE = "store.url=s3://bucket/run"
WORKDAY = Window(8 * 60, 18 * 60, 50 * MIB)


def plan_of(text: str) -> BandwidthPlan:
    return load(None, [STORE, f"flush.bandwidth_limit={text}"], {}).flush.bandwidth_limit


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("off", BandwidthPlan()),
        ("none", BandwidthPlan()),
        ("", BandwidthPlan()),
        ("200MiB", BandwidthPlan((), 200 * MIB)),
        ("200MiB/s", BandwidthPlan((), 200 * MIB)),
        ("08:00-18:00=50MiB,otherwise=off", BandwidthPlan((WORKDAY,))),
        ("08:00-18:00=50MiB", BandwidthPlan((WORKDAY,))),
        (" 8:00 - 18:00 = 50 MiB/s , otherwise = 1GiB", BandwidthPlan((WORKDAY,), 1 << 30)),
        ("22:00-06:00=off,otherwise=10", BandwidthPlan((Window(1320, 360, None),), 10)),
        (
            "18:00-24:00=1,08:00-18:00=50MiB",
            BandwidthPlan((WORKDAY, Window(1080, 1440, 1))),
        ),
    ],
)
def test_plans(text: str, plan: BandwidthPlan) -> None:
    assert plan_of(text) == plan


def test_a_file_may_give_a_list_or_a_number(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[flush]\nbandwidth_limit = ['08:00-18:00=50MiB', 'otherwise=off']")
    assert load(file, [STORE], {}).flush.bandwidth_limit == BandwidthPlan((WORKDAY,))
    file.write_text("[flush]\nbandwidth_limit = 1000")
    assert load(file, [STORE], {}).flush.bandwidth_limit == BandwidthPlan((), 1000)


@pytest.mark.parametrize("text", ["off", "200MiB", "08:00-18:00=50MiB,22:00-23:30=off"])
def test_settings_travel_as_json(text: str) -> None:
    settings = load(None, [STORE, f"flush.bandwidth_limit={text}"], {})
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fast", "'fast' is not a size"),
        ("0", "must be greater than 0; write off for no limit"),
        ("08:00-18:00=0", "must be greater than 0"),
        ("200MiB,otherwise=off", "'200MiB' has no time"),
        ("8-18=50MiB", "'8-18' is not a time of day such as 08:00-18:00"),
        ("08:00-25:00=1MiB", "hours go to 23, minutes to 59"),
        ("08:60-09:00=1MiB", "hours go to 23, minutes to 59"),
        ("08:00-08:00=1MiB", "begins where it ends"),
        ("08:00-18:00=1MiB,17:00-19:00=2MiB", "08:00-18:00 and 17:00-19:00 overlap"),
        ("22:00-06:00=1MiB,05:00-07:00=2MiB", "22:00-06:00 and 05:00-07:00 overlap"),
        ("08:00-18:00=1,otherwise=1,otherwise=2", "`otherwise` is there more than once"),
        ("08:00-18:00=quick", "'quick' is not a size"),
        ("true", "is not a size"),
    ],
)
def test_mistakes_are_explained(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(text)
    assert caught.value.exit_code == 2
    said = str(caught.value)
    assert "flush.bandwidth_limit" in said
    assert reason in said
    assert "\n" not in said
