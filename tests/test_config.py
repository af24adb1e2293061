"""Settings: layers, units, and what is said about mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.config import Settings, StoreSettings, load, parse_duration, parse_size
from cachefs.errors import ConfigError
from cachefs.model import names
from cachefs.model.bandwidth import BandwidthPlan

STORE = "store.url=s3://bucket/run"


def _load(*overrides: str, file: Path | None = None, env: dict[str, str] | None = None) -> Settings:
    return load(file, [STORE, *overrides], env or {})


def _complaint(*overrides: str, file: Path | None = None, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(*overrides, file=file, env=env)
    assert caught.value.exit_code == 2
    line = str(caught.value)
    assert "\n" not in line
    return line


def _toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cachefs.toml"
    path.write_text(text)
    return path


# ---- defaults and layers -----------------------------------------------------------------------


def test_the_documented_defaults() -> None:
    settings = _load()
    assert settings.flush.settle == 1.0
    assert settings.flush.settle_max == 10.0
    assert settings.cache.preserve_limit == 1 << 30
    assert settings.cache.full == "wait"
    assert settings.mount.passthrough == settings.mount.takeover == "auto"
    assert settings.mount.takeover_timeout == 600.0
    assert settings.metrics.address == ("127.0.0.1", 9469)
    assert settings.order.barrier == names.BARRIER_PATTERNS
    assert 1 <= settings.flush.movers <= 4
    assert settings.node.id


def test_later_layers_win(tmp_path: Path) -> None:
    file = _toml(
        tmp_path, "[flush]\nsettle = '2s'\nthreads = 2\nconcurrency = 3\npart_size = '6MiB'"
    )
    settings = load(
        file,
        [STORE, "flush.threads=5", "flush.part_size=8MiB"],
        {"CACHEFS_FLUSH__CONCURRENCY": "4", "CACHEFS_FLUSH__THREADS": "4"},
        {"flush.part_size": "9MiB", "flush.movers": None},
    )
    flush = settings.flush
    assert (flush.settle, flush.concurrency, flush.threads) == (2.0, 4, 5)
    assert flush.part_size == 9 << 20


def test_the_last_of_repeated_options_wins() -> None:
    assert _load("flush.settle=2s", "flush.settle=3s").flush.settle == 3.0


def test_a_file_may_set_every_section(tmp_path: Path) -> None:
    file = _toml(
        tmp_path,
        """
        [store]
        endpoint = "http://localhost:8333/"
        require = false
        [cache]
        dirs = ["/a", "/b"]
        size = "2GiB"
        [order]
        mode = "strict"
        barrier = ["@defaults", "READY"]
        [tiers]
        warm = "/lustre/warm"
        [checkpoint]
        nodes = 8
        [mount]
        umask = "027"
        allow_other = false
        [metrics]
        listen = "off"
        [node]
        id = "n1"
        [log]
        format = "json"
        [pacer]
        max_rate = 50
        initial_rate = 5
        """,
    )
    settings = _load(file=file)
    assert settings.store.endpoint == "http://localhost:8333"
    assert settings.cache.dirs == (Path("/a"), Path("/b"))
    assert settings.order.barrier == (*names.BARRIER_PATTERNS, "READY")
    assert settings.tiers.warm == Path("/lustre/warm")
    assert settings.mount.umask == 0o027
    assert settings.metrics.address is None
    assert settings.pacer.max_rate == 50.0


def test_environment_names_are_sections_and_keys() -> None:
    env = {
        "CACHEFS_CACHE__DIRS": "/a, /b",
        "CACHEFS_ORDER__UNORDERED": '["x,y/**"]',
        "CACHEFS_MOUNT__ALLOW_OTHER": "off",
        "CACHEFS_DEBUG": "1",
        "PATH": "/bin",
    }
    settings = _load(env=env)
    assert settings.cache.dirs == (Path("/a"), Path("/b"))
    assert settings.order.unordered == ("x,y/**",)
    assert settings.mount.allow_other is False


def test_optional_settings_can_be_unset_again(tmp_path: Path) -> None:
    file = _toml(tmp_path, "[flush]\nbandwidth_limit = '1GiB/s'\ndrain_timeout = '5min'")
    assert _load(file=file).flush.bandwidth_limit == BandwidthPlan(otherwise=1 << 30)
    flush = _load("flush.bandwidth_limit=none", "flush.drain_timeout=none", file=file).flush
    assert flush.bandwidth_limit == BandwidthPlan()
    assert flush.drain_timeout is None


def test_movers_auto_is_resolved_so_that_the_daemon_gets_a_number() -> None:
    assert _load("flush.movers=auto").flush.movers == _load().flush.movers
    assert _load("flush.movers=7").flush.movers == 7


def test_relative_directories_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _load("cache.dirs=x").cache.dirs == (tmp_path / "x",)


def test_each_store_has_a_default_cache_directory_of_its_own() -> None:
    stores = [
        ("s3://bucket/run", None),
        ("s3://bucket/run", "http://other:1"),
        ("s3://bucket-run", None),
        ("file:///data", None),
    ]
    found = {
        load(None, [], {}, {"store.url": url, "store.endpoint": endpoint}).cache.dirs
        for url, endpoint in stores
    }
    assert len(found) == len(stores)
    for (directory,) in found:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", directory.name)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("file:///data/x/", "file:///data/x"),
    ],
)
def test_store_urls(given: str, kept: str) -> None:
    assert StoreSettings(url=given).url == kept


# ---- units -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512B", 512),
        ("64K", 65536),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5MiB", 3 << 19),
        ("1.5GB", 1_500_000_000),
        ("3T", 3 << 40),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("10s", 10.0),
        ("5min", 300.0),
        ("1h", 3600.0),
        ("2d", 172800.0),
        ("1.5", 1.5),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_duration):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert isinstance(value, (int, float))
        assert value >= 0


# ---- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("flush.setle", "flush.settle"),
        ("settle", "flush.settle"),
        ("flsh.settle", "flush.settle"),
        ("mount.settle", "flush.settle"),
        ("cache.sizes", "cache.size"),
        ("order.modes", "order.mode"),
        ("metadata_ttl", "mount.metadata_ttl"),
        ("flush.band_width_limit", "flush.bandwidth_limit"),
    ],
)
def test_an_unknown_key_names_its_nearest_neighbour(name: str, meant: str) -> None:
    line = _complaint(f"{name}=1")
    assert f"`{name}`" in line
    assert f"did you mean `{meant}`?" in line


def test_a_key_like_nothing_gets_no_suggestion() -> None:
    assert "did you mean" not in _complaint("flush.qqqqqqqqqq=1")


def test_the_line_names_the_file(tmp_path: Path) -> None:
    file = _toml(tmp_path, "[flush]\nsetle = 1\n")
    line = _complaint(file=file)
    assert line.startswith(f"{file}: `flush.setle`: unknown key")


def test_the_line_names_the_variable() -> None:
    line = _complaint(env={"CACHEFS_CACHE__SIZE": "much"})
    assert "environment variable CACHEFS_CACHE__SIZE: `cache.size`: 'much' is not a size" in line


def test_a_value_that_a_later_layer_replaces_is_no_mistake() -> None:
    assert _load("flush.settle=2s", env={"CACHEFS_FLUSH__SETTLE": "x"}).flush.settle == 2.0


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("flush.settle=1x", "is not a time"),
        ("flush.settle=-1s", "is not a time"),
        ("flush.settle=20s", "must not exceed settle_max"),
        ("flush.concurrency=0", "greater than or equal to 1"),
        ("flush.concurrency=many", "integer"),
        ("flush.part_size=1MiB", "greater than or equal to 5242880"),
        ("flush.bandwidth_limit=0", "greater than 0"),
        ("order.mode=loose", "must be one of safe or strict"),
        ("order.data=[1", "not a JSON list"),
        ('order.data=["a", 1]', "string"),
        ("order.data=/", "empty pattern"),
        ("cache.full=panic", "must be one of wait or enospc"),
        ("cache.high_watermark=1.5", "less than 1"),
        ("cache.high_watermark=0.7", "low_watermark (0.8) must be below"),
        ("mount.umask=999", "octal"),
        ("mount.allow_other=perhaps", "boolean"),
        ("metrics.listen=9469", "is not host:port or off"),
        ("metrics.listen=localhost:99999", "is not host:port or off"),
        ("node.id=a/b", "pattern"),
        ("pacer.initial_rate=9000", "min_rate <= initial_rate <= max_rate"),
        ("pacer.decrease=nan", "finite"),
        ("store.url=http://bucket/x", "s3://bucket/prefix or file:///directory"),
        ("store.url=s3://", "s3://bucket/prefix or file:///directory"),
        ("store.url=file://host/x", "s3://bucket/prefix or file:///directory"),
        ("store.endpoint=localhost:8333", "http(s)://host"),
        ("store.endpoint=http://localhost:s3", "http(s)://host"),
        ("store.endpoint=http://localhost:83333", "http(s)://host"),
        ("store.addressing=any", "auto, path or virtual"),
    ],
)
def test_bad_values_are_explained(override: str, says: str) -> None:
    line = _complaint(override)
    section = override.partition(".")[0]
    assert line.startswith(f"-o: `{section}")
    assert says in line


def test_several_mistakes_are_counted() -> None:
    assert _complaint("flush.threads=0", "flush.movers=0").endswith("(and 1 more)")


def test_an_option_without_a_value() -> None:
    assert _complaint("flush.settle").endswith(
        "expected section.key=value; did you mean `flush.settle=VALUE`?"
    )
    assert _complaint("flush").endswith("expected section.key=value")


def test_a_missing_store() -> None:
    with pytest.raises(ConfigError, match=r"store\.url.*missing"):
        load(None, [], {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("flush = 3", "`flush`: is a section, so write [flush]"),
        ("settle = 3", "did you mean `flush.settle`?"),
        ("[flsh]\nsettle = 3", "`flsh`: unknown section; did you mean `flush`?"),
        ("[flush]\nsettle = ", "not valid TOML"),
        ("[flush]\nsettle = {a = 1}", "`flush.settle`"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    file = _toml(tmp_path, text)
    line = _complaint(file=file)
    assert str(file) in line
    assert says in line


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    line = _complaint(file=tmp_path / "none.toml")
    assert "none.toml: No such file or directory" in line


@pytest.mark.parametrize(
    "override",
    [
        "store.secret_key=hunter2",
        "store.aws_session_token=hunter2",
        "store.url=s3://user:hunter2@bucket/x",
        "store.endpoint=http://user:hunter2@host",
    ],
)
def test_secrets_are_refused_and_not_repeated(override: str) -> None:
    line = _complaint(override)
    assert "hunter2" not in line
    assert "credentials" in line
    assert "profile" in line


# ---- JSON --------------------------------------------------------------------------------------


def test_json_round_trip() -> None:
    settings = _load(
        "cache.dirs=/a,/b", "cache.size=3GiB", "tiers.warm=/w", "mount.umask=077",
        "flush.drain_timeout=5s", "order.data=@defaults,*.x", "log.level=debug",
    )  # fmt: skip
    assert Settings.from_json(settings.to_json()) == settings
    assert Settings.from_json(settings.to_json().encode()) == settings


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"store": {"url": "s3://b"}, "x": 1}'])
def test_json_that_is_not_settings(text: str) -> None:
    with pytest.raises(ConfigError, match="settings"):
        Settings.from_json(text)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        _load().flush.settle = 5.0  # type: ignore[misc]


def test_every_default_is_valid_when_given_as_a_value() -> None:
    settings = _load()
    again = Settings.model_validate(settings.model_dump())
    assert again == settings
