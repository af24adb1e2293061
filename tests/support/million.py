"""An S3 server with a million objects that take no space: they are made up as they are asked for.

    python -m tests.support.million DIRECTORIES FILES     prints its port; ends when its stdin does

Object `runs/dNNNN/fNNNN` has `SIZE` bytes. What is put is kept in memory beside them. Knows what a
mount needs for reading, and multipart uploads as far as its probe of the store tries them.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

SIZE = 1 << 20
PREFIX = "runs/"
_KEY = re.compile(rf"{PREFIX}d(\d{{4}})/f(\d{{4}})")
_WHEN = "2026-01-01T00:00:00.000Z"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    directories: ClassVar[int] = 0
    files: ClassVar[int] = 0
    kept: ClassVar[dict[str, bytes]] = {}

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is told."""

    def do_GET(self) -> None:
        path, query = self._asked()
        if "/" not in path:
            self._list(query)
            return
        body = self._body(path.partition("/")[2])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if body is None:
            self._error(404, "NoSuchKey")
        elif asked is None:
            self._answer(200, body)
        else:
            start, last = int(asked[1]), int(asked[2] or len(body) - 1)
            last = min(last, len(body) - 1)
            span = {"Content-Range": f"bytes {start}-{last}/{len(body)}"}
            self._answer(206, body[start : last + 1], span)

    def do_HEAD(self) -> None:
        body = self._body(self._asked()[0].partition("/")[2])
        if body is None and "/" in self._asked()[0]:
            self._error(404, "NoSuchKey")
        else:
            self._answer(200, body or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, query = self._asked()
        key = path.partition("/")[2]
        if self.headers.get("x-amz-copy-source"):
            self._error(501, "NotImplemented")
            return
        if "partNumber" in query:
            self._answer(200, b"")
            return
        if self.headers.get("If-None-Match") == "*" and self._body(key) is not None:
            self._error(412, "PreconditionFailed")
            return
        self.kept[key] = data
        self._answer(200, b"")

    def do_DELETE(self) -> None:
        self.kept.pop(self._asked()[0].partition("/")[2], None)
        self._answer(204, b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploads" in self._asked()[1]:
            name = "InitiateMultipartUploadResult"
            text = f"<{name}><UploadId>1</UploadId></{name}>"
            self._answer(200, text.encode(), {"Content-Type": "application/xml"})
        else:
            self._error(501, "NotImplemented")

    # -- content ------------------------------------------------------------------------------

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).strip("/"), dict(parse_qsl(parts.query, keep_blank_values=True))

    def _body(self, key: str) -> bytes | None:
        match = _KEY.fullmatch(key)
        if match and int(match[1]) < self.directories and int(match[2]) < self.files:
            return key.encode().ljust(SIZE, b".")
        return self.kept.get(key)

    def _list(self, query: dict[str, str]) -> None:
        """One page; the token is the last name of the page before."""
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        most = int(query.get("max-keys", 1000))
        found: list[tuple[str, bool]] = []
        for name, is_prefix in self._names(prefix, query.get("delimiter", "")):
            if name > after:
                found.append((name, is_prefix))
                if len(found) > most:
                    break
        page, more = found[:most], len(found) > most
        token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"
        parts = [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if is_prefix
            else f"<Contents><Key>{escape(name)}</Key><LastModified>{_WHEN}</LastModified>"
            f'<ETag>"{_etag(name)}"</ETag><Size>{len(self._body(name) or b"")}</Size></Contents>'
            for name, is_prefix in page
        ]
        text = (
            '<?xml version="1.0"?><ListBucketResult>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token if more else ''}"
            f"{''.join(parts)}</ListBucketResult>"
        )
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _names(self, prefix: str, delimiter: str) -> Iterator[tuple[str, bool]]:
        """(name, whether it is a common prefix) in order."""
        kept = [(key, False) for key in sorted(self.kept) if key.startswith(prefix)]
        inside = re.fullmatch(rf"{PREFIX}d(\d{{4}})/", prefix)
        made: Iterator[tuple[str, bool]] = iter(())
        if inside and int(inside[1]) < self.directories:
            made = ((f"{prefix}f{n:04d}", False) for n in range(self.files))
        elif prefix == PREFIX and delimiter:
            made = ((f"{PREFIX}d{n:04d}/", True) for n in range(self.directories))
        elif PREFIX.startswith(prefix) and not delimiter:
            folders = (f"{PREFIX}d{n:04d}/" for n in range(self.directories))
            made = ((f"{d}f{n:04d}", False) for d in folders for n in range(self.files))
        if delimiter:
            cut = len(prefix)
            kept = [(k, False) for k, _ in kept if delimiter not in k[cut:]]
        yield from kept
        yield from made

    # -- answers ------------------------------------------------------------------------------

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        key = self._asked()[0].partition("/")[2]
        given = {"ETag": f'"{_etag(key)}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        for name, value in {**given, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._answer(status, text, {"Content-Type": "application/xml"})


def _etag(key: str) -> str:
    return f"{hash(key) & (1 << 64) - 1:032x}"


def main() -> None:
    """Serve until stdin ends."""
    Handler.directories, Handler.files = int(sys.argv[1]), int(sys.argv[2])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
