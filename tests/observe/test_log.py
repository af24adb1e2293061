"""The log: one form for all, and nothing secret in it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from cachefs.observe import log


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log"


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_events_are_key_value_lines(file: Path) -> None:
    log.configure("info", "text", file)
    log.get_logger("cachefs.flush").info("sealed", path="/a b", size=3)
    (line,) = file.read_text().splitlines()
    assert line.startswith("time=2")
    assert 'level=info event=sealed path="/a b" size=3 logger=cachefs.flush' in line


def test_a_newline_in_a_name_splits_no_line(file: Path) -> None:
    log.configure("info", "text", file)
    log.get_logger("x").info("sealed", path="/a\nlevel=error")
    assert len(file.read_text().splitlines()) == 1


def test_standard_library_records_come_out_alike(file: Path) -> None:
    log.configure("info", "json", file)
    logging.getLogger("pyfuse3").warning("no %s", "space")
    log.get_logger("cachefs").warning("no %s", "room", path="/p")
    first, second = _records(file)
    assert first["event"] == "no space"
    assert first["logger"] == "pyfuse3"
    assert second["event"] == "no room"
    assert set(first) | {"path"} == set(second)


def test_levels(file: Path) -> None:
    log.configure("warning", "json", file)
    log.get_logger("a").info("quiet")
    logging.getLogger("b").info("quiet")
    log.get_logger("a").warning("loud")
    assert [record["event"] for record in _records(file)] == ["loud"]


def test_tracebacks_are_part_of_the_record(file: Path) -> None:
    log.configure("info", "json", file)
    try:
        raise ValueError("AWS_SECRET_ACCESS_KEY=hunter2")
    except ValueError:
        log.get_logger("a").exception("failed", path="/p")
        logging.getLogger("b").exception("failed too")
    for record in _records(file):
        assert "ValueError" in record["exception"]
        assert "hunter2" not in record["exception"]


def test_debug_does_not_let_libraries_write_headers(file: Path) -> None:
    log.configure("debug", "json", file)
    logging.getLogger("botocore.endpoint").debug("headers")
    logging.getLogger("urllib3.connectionpool").debug("headers")
    log.get_logger("cachefs").debug("ours")
    assert [record["event"] for record in _records(file)] == ["ours"]


def test_values_that_json_does_not_know(file: Path) -> None:
    log.configure("info", "json", file)
    log.get_logger("a").info("x", path=Path("/p"), none=None, flag=True, items=[1])
    (record,) = _records(file)
    assert (record["path"], record["none"], record["flag"]) == ("/p", None, True)


@pytest.mark.parametrize("style", ["text", "json"])
def test_secrets_stay_out(file: Path, style: Any) -> None:
    log.configure("info", style, file)
    logger = log.get_logger("a")
    logger.info("x", secret_key="hunter2", aws_session_token="hunter2", Authorization="hunter2")
    logger.info("GET https://u:hunter2@host/k?X-Amz-Signature=hunter2&partNumber=7")
    logger.info("failed", error="{'aws_secret_access_key': 'hunter2'}")
    logging.getLogger("b").info(
        "Authorization: AWS4-HMAC-SHA256 Credential=hunter2/x, Signature=hunter2"
    )
    text = file.read_text()
    assert "hunter2" not in text
    assert "partNumber=7" in text


def test_ordinary_words_stay() -> None:
    text = "credentials are expired; reload them: see https://host/a@b and user@host"
    assert log.hide_secrets(text) == text


def test_configuring_again_replaces(file: Path, tmp_path: Path) -> None:
    log.configure("info", "json", file)
    log.configure("info", "json", tmp_path / "second")
    log.get_logger("a").info("once")
    assert file.read_text() == ""
    assert len(_records(tmp_path / "second")) == 1


def test_who_logs_does_not_wait_for_the_disk(file: Path) -> None:
    """The log may be on the disk that is in trouble."""
    log.configure("info", "json", file)
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler, logging.StreamHandler)
    go = threading.Event()
    real = handler.stream.write
    handler.stream.write = lambda text: (go.wait(10), real(text))
    log.write_apart()
    for number in range(100):
        log.get_logger("a").info("told", number=number)
    assert _records(file) == []
    go.set()
    log.finish()
    assert [record["number"] for record in _records(file)] == list(range(100))


def test_the_last_words_are_written(file: Path) -> None:
    log.configure("info", "json", file)
    log.write_apart()
    log.get_logger("a").critical("the end")
    assert [record["event"] for record in _records(file)] == ["the end"]
