"""The log: structlog events and standard library records in one stream, without secrets.

Lines are key=value text or JSON objects. Everything passes through the standard library's root
logger, so records of pyfuse3, botocore and trio come out in the same form; libraries that write
request headers at debug level are kept at warning.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, Literal

from cachefs.observe.plain import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

_SECRET_KEY = re.compile(
    r"secret|password|token|access_?key|authorization|signature", re.IGNORECASE
)
_SECRET_TEXT = re.compile(
    r"(?i)((?:x-amz-(?:signature|credential|security-token)|authorization|signature|credential"
    r"|aws_(?:secret_access_key|session_token)|secret(?:_access)?_key|session_token)"
    r"[\"']?\s*[=:]\s*[\"']?)[^\s\"'&,;]+(?:\s+Credential=[^\n]*)?"
)
_USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
_HEADER_LOGGERS = ("botocore", "boto3", "urllib3", "s3transfer", "awscrt")
_HIDDEN = "[hidden]"
_PATIENCE = 2.0
"""Seconds for which somebody waits for the log to be written who is about to end."""


def configure(
    level: str = "info",
    style: Literal["text", "json"] = "text",
    file: str | os.PathLike[str] | None = None,
) -> None:
    """Set the log up for this process; `file` is appended to, None means standard error.

    Raises OSError when the file cannot be opened.
    """
    handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_common(),
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_last(style)],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _HEADER_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_common(),
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def write_apart() -> None:
    """From now on lines are written by a thread: nobody who logs waits for the disk of the log."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, logging.StreamHandler):
            root.removeHandler(handler)
            root.addHandler(_Apart(handler))


def finish() -> None:
    """Return when all has been written, or cannot be for now."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class _Apart(logging.Handler):
    """Hands lines on, in order, to a handler that may wait. Its thread is never joined: a write
    that hangs in the kernel must not keep the process."""

    def __init__(self, to: logging.StreamHandler[Any]) -> None:
        super().__init__(to.level)
        self._to = to
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Format it here: what it tells of may change."""
        try:
            self._lines.put(self._to.format(record))
        except Exception:
            self.handleError(record)
        if record.levelno >= logging.CRITICAL:  # The end may be near.
            self.flush()

    def flush(self) -> None:
        """Wait for a while until all has been written."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(_PATIENCE)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._to.stream.write(line + self._to.terminator)
                self._to.flush()
            except (OSError, ValueError):
                pass  # A full disk, or a log that was closed: as little as can be said of it here.


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that takes an event and key=value pairs: `log.info("sealed", path=path)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def hide_secrets(text: str) -> str:
    """`text` without credentials, signatures and the user part of URLs."""
    return _USERINFO.sub("", _SECRET_TEXT.sub(rf"\1{_HIDDEN}", text))


def _common() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]


def _last(style: Literal["text", "json"]) -> list[Processor]:
    """Tracebacks become text first, so that secrets in them are hidden as well."""
    head: list[Processor] = [structlog.processors.format_exc_info, _redact]
    if style == "json":
        return [*head, structlog.processors.JSONRenderer(default=str)]
    order = ["time", "level", "event"]
    return [
        *head,
        structlog.processors.LogfmtRenderer(key_order=order, drop_missing=True, bool_as_flag=False),
    ]


def _redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {key: _redacted(key, value) for key, value in event.items()}


def _redacted(key: str, value: Any) -> Any:
    if _SECRET_KEY.search(key):
        return _HIDDEN
    if isinstance(value, (int, float, bool)) or value is None:
        return value
    return hide_secrets(str(value))
