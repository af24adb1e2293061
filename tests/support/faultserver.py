"""The process behind `faultproxy.FaultProxy`: an HTTP proxy in front of one S3 store.

Requests are passed on as they came, the Host header too, so signatures stay valid. Every request is
classified as an operation on a key, and rules (see `faults`) decide what becomes of it. Control is
a second port that takes one JSON object per line. Ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.support.faults import Fault, Rule

PIECE = 64 * 1024
LOG_LENGTH = 200_000
HEADERS_LIMIT = 256 * 1024
_ASKS_STORE_FIRST = {
    Fault.RESET_REPLY, Fault.LOST_REPLY, Fault.COMMITTED_ERROR_BODY, Fault.TRICKLE,
    Fault.SHORT_READ, Fault.WRONG_CHECKSUM, Fault.STALE_ETAG, Fault.CORRUPT_REQUEST,
}  # fmt: skip


class Dropped(Exception):
    """This client connection is over."""


@dataclass
class Head:
    """First line and headers of a request or reply."""

    first: str
    headers: list[tuple[str, str]]

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def replace(self, name: str, value: str) -> None:
        self.headers = [(key, value if key.lower() == name else old) for key, old in self.headers]

    def pack(self) -> bytes:
        lines = [self.first, *(f"{key}: {value}" for key, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")

    @property
    def status(self) -> int:
        return int(self.first.split()[1])


@dataclass
class Entry:
    """One line of the log."""

    time: float
    op: str
    key: str
    status: int
    """What the client was told; 0: nothing."""
    fault: str
    sent: int
    """Bytes of the request's body that came."""
    received: int
    """Bytes of the reply's body that went back."""


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head; None at the end of the connection."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return Head(first, [(key, value.strip()) for key, value in pairs])


def classify(head: Head) -> tuple[str, str]:
    """Operation and key of a request."""
    method, target, _ = head.first.split(" ", 2)
    parts = urlsplit(target)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if not key:
        return _bucket_op(method, query), query.get("prefix", bucket)
    copies = head.get("x-amz-copy-source") is not None
    ops = {
        ("PUT", True): "copy_part" if copies else "upload_part",
        ("PUT", False): "copy" if copies else "put",
        ("POST", True): "complete_upload",
        ("POST", False): "create_upload",
        ("DELETE", True): "abort_upload",
        ("DELETE", False): "delete",
        ("GET", True): "list_parts",
        ("GET", False): "get",
    }
    return ops.get((method, "uploadId" in query), "head"), key


def _bucket_op(method: str, query: dict[str, str]) -> str:
    if method == "POST" and "delete" in query:
        return "delete"
    if method == "GET":
        return "list_uploads" if "uploads" in query else "list"
    return "bucket"


class Proxy:
    """State of the process."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.rules: list[Rule] = []
        self.rng = random.Random(0)
        self.log: deque[Entry] = deque(maxlen=LOG_LENGTH)
        self.counts: Counter[str] = Counter()
        self.most_at_once = 0
        self._at_once = 0
        self._tokens: dict[int, tuple[float, float]] = {}
        self._started = time.monotonic()
        self._cleared = asyncio.Event()

    async def linger(self, seconds: float) -> None:
        """Wait so long, or until there are no rules any more."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cleared.wait(), seconds)

    async def serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One client connection, request by request."""
        try:
            while (head := await read_head(reader)) is not None:
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                try:
                    await Exchange(self, reader, writer, head).run()
                finally:
                    self._at_once -= 1
        except (Dropped, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def choose(self, op: str, keys: list[str]) -> tuple[float, Rule | None]:
        """Seconds to wait, and the rule that decides."""
        latency = 0.0
        for number, rule in enumerate(self.rules):
            if not rule.matches(op, keys, self.rng):
                continue
            if rule.fault is Fault.LATENCY:
                latency += rule.seconds
            elif rule.fault is not Fault.BUDGET or not self._affordable(number, rule):
                return latency, rule
        return latency, None

    def _affordable(self, number: int, rule: Rule) -> bool:
        now = time.monotonic()
        tokens, then = self._tokens.get(number, (rule.rate, now))
        tokens = min(rule.rate, tokens + (now - then) * rule.rate)
        self._tokens[number] = (max(tokens - 1, 0.0) if tokens >= 1 else tokens, now)
        return tokens >= 1

    def record(
        self, op: str, key: str, status: int, rule: Rule | None, sent: int, received: int
    ) -> None:
        """Count a request that is over."""
        fault = rule.fault.value if rule is not None else ""
        now = time.monotonic() - self._started
        self.log.append(Entry(now, op, key, status, fault, sent, received))
        self.counts[f"{op} {status or 'dropped'}"] += 1
        self.counts["bytes_in"] += sent
        self.counts["bytes_out"] += received

    def command(self, request: dict[str, Any]) -> Any:
        """Carry out a line of the control connection."""
        match request["do"]:
            case "rules":
                self.rng = random.Random(request.get("seed", 0))
                self._tokens.clear()
                self.rules = [
                    Rule(**{**rule, "fault": Fault(rule["fault"]), "ops": tuple(rule["ops"])})
                    for rule in request["rules"]
                ]
                if not self.rules:
                    self._cleared.set()
                    self._cleared = asyncio.Event()
            case "used":
                return [rule.used for rule in self.rules]
            case "counts":
                return {**self.counts, "most_at_once": self.most_at_once}
            case "log":
                return [asdict(entry) for entry in self.log]
            case "forget":
                self.log.clear()
                self.counts.clear()
                self.most_at_once = 0
        return None

    async def serve_control(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One control connection."""
        while line := await reader.readline():
            writer.write(json.dumps(self.command(json.loads(line))).encode() + b"\n")
            await writer.drain()
        writer.close()


class Exchange:
    """One request and its reply."""

    def __init__(
        self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: Head
    ) -> None:
        self.proxy = proxy
        self.reader = reader
        self.writer = writer
        self.head = head
        self.op, key = classify(head)
        self.keys = [key]
        self.buffered = b""
        self.left = int(head.get("content-length") or 0)
        self.expects = head.get("expect") is not None
        self.sent = self.received = self.status = 0
        self.rule: Rule | None = None
        self.store: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self) -> None:
        """Pass it on, or do what a rule says. Raises Dropped when the connection is over."""
        if self.op == "delete" and self.head.first.startswith("POST"):
            await self._read_keys()
        latency, self.rule = self.proxy.choose(self.op, self.keys)
        try:
            if latency:
                await self.proxy.linger(latency)
            if self.rule is None or self.rule.fault in _ASKS_STORE_FIRST:
                await self._through_store()
            else:
                await self._without_store(self.rule)
            await self.writer.drain()
        finally:
            if self.store is not None:
                self.store[1].close()
            self.proxy.record(
                self.op, "\n".join(self.keys), self.status, self.rule, self.sent, self.received
            )

    async def _without_store(self, rule: Rule) -> None:
        match rule.fault:
            case Fault.BUDGET:
                await self._answer(503, "SlowDown", rule.retry_after)
            case Fault.ERROR:
                await self._answer(rule.status, rule.code, rule.retry_after)
            case Fault.ERROR_BODY:
                await self._answer(200, "InternalError", None)
            case Fault.HANG:
                await asyncio.sleep(rule.seconds)
                raise Dropped
            case Fault.RESET_REQUEST:
                await self._continue()
                self.left = min(self.left, rule.after)
                await self._drain_body()
                self._reset()

    async def _answer(self, status: int, code: str, retry_after: float | None) -> None:
        if not self.expects:  # else the client has not sent it and will not
            await self._drain_body()
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as told</Message></Error>"
        if self.head.first.startswith("HEAD"):
            body = ""
        lines = [f"HTTP/1.1 {status} Told", "Content-Type: application/xml"]
        lines += [f"Retry-After: {retry_after}"] if retry_after is not None else []
        lines += [f"Content-Length: {len(body)}", "", body]
        self.status = status
        self.writer.write("\r\n".join(lines).encode())

    async def _through_store(self) -> None:
        self.store = await asyncio.open_connection(*self.proxy.upstream, limit=HEADERS_LIMIT)
        reader, writer = self.store
        writer.write(self.head.pack())
        reply = await self._expected_reply() if self.expects else None
        if reply is None:
            await self._forward_body(writer)
            reply = await self._final_head(reader)
        await self._pass_reply(reply)

    async def _expected_reply(self) -> Head | None:
        """The store's final reply, if it does not want the body; else None."""
        assert self.store is not None
        reply = await read_head(self.store[0])
        if reply is None:
            raise Dropped
        if reply.status != 100:
            self.left = 0
            return reply
        await self._continue()
        return None

    async def _continue(self) -> None:
        if self.expects:
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await self.writer.drain()
            self.expects = False

    async def _forward_body(self, writer: asyncio.StreamWriter) -> None:
        spoil = self.rule is not None and self.rule.fault is Fault.CORRUPT_REQUEST
        while self.left:
            piece = await self._body_piece()
            if spoil:
                piece, spoil = bytes([piece[0] ^ 1]) + piece[1:], False
            with contextlib.suppress(ConnectionError):  # it may have answered and gone
                writer.write(piece)
                await writer.drain()

    async def _drain_body(self) -> None:
        while self.left:
            await self._body_piece()

    async def _read_keys(self) -> None:
        """A batch delete names its keys in its body."""
        self.buffered = await self.reader.readexactly(self.left)
        found = re.findall(rb"<Key>([^<]*)</Key>", self.buffered)
        self.keys = [html.unescape(key.decode()) for key in found]

    async def _body_piece(self) -> bytes:
        if self.buffered:
            piece, self.buffered = self.buffered, b""
            self.left, self.sent = 0, len(piece)
            return piece
        piece = await self.reader.read(min(PIECE, self.left))
        if not piece:
            raise Dropped
        self.left -= len(piece)
        self.sent += len(piece)
        return piece

    async def _final_head(self, reader: asyncio.StreamReader) -> Head:
        while True:
            reply = await read_head(reader)
            if reply is None:
                raise Dropped
            if reply.status != 100:
                return reply

    async def _pass_reply(self, reply: Head) -> None:
        body = await self._reply_body(reply)
        rule = self.rule if reply.status < 300 else None
        match rule.fault if rule is not None else None:
            case Fault.LOST_REPLY:
                raise Dropped
            case Fault.COMMITTED_ERROR_BODY:
                await self._answer(200, "InternalError", None)
                return
            case Fault.WRONG_CHECKSUM:
                body = self._spoil_checksum(reply, body)
            case Fault.STALE_ETAG:
                reply.replace("etag", '"0123456789abcdef0123456789abcdef"')
            case Fault.RESET_REPLY if not body:
                self._reset()
        self.status = reply.status
        if self.head.first.startswith("HEAD"):
            self.writer.write(reply.pack())
            return
        # Chunked replies go on with a length: the framing between store and proxy is theirs.
        reply.headers = [
            (key, value)
            for key, value in reply.headers
            if key.lower() not in ("transfer-encoding", "content-length")
        ]
        reply.headers.append(("Content-Length", str(len(body))))
        self.writer.write(reply.pack())
        await self._pass_body(body, rule)

    async def _pass_body(self, body: bytes, rule: Rule | None) -> None:
        if rule is not None and rule.fault in (Fault.RESET_REPLY, Fault.SHORT_READ):
            cut = min(rule.after, max(len(body) - 1, 0))
            self.writer.write(body[:cut])
            await self.writer.drain()
            self.received = cut
            if rule.fault is Fault.RESET_REPLY:
                self._reset()
            raise Dropped
        step = PIECE
        if rule is not None and rule.fault is Fault.TRICKLE:
            step = max(1, int(rule.rate / 20))
        for start in range(0, len(body), step):
            self.writer.write(body[start : start + step])
            await self.writer.drain()
            self.received = min(len(body), start + step)
            if step != PIECE:
                await asyncio.sleep(0.05)

    async def _reply_body(self, reply: Head) -> bytes:
        assert self.store is not None
        reader = self.store[0]
        if self.head.first.startswith("HEAD") or reply.status in (204, 304):
            return b""
        if (reply.get("transfer-encoding") or "").lower() == "chunked":
            return await _chunks(reader)
        length = reply.get("content-length")
        return await (reader.read() if length is None else reader.readexactly(int(length)))

    @staticmethod
    def _spoil_checksum(reply: Head, body: bytes) -> bytes:
        wrong = "AAAAAAAAAAE="
        reply.replace("x-amz-checksum-crc64nvme", wrong)
        return re.sub(rb"(<ChecksumCRC64NVME>)[^<]*", lambda found: found[1] + wrong.encode(), body)

    def _reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        raise Dropped


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    while (await reader.readline()).strip():
        pass
    return bytes(body)


async def main(upstream: str) -> None:
    """Serve until stdin ends; the two ports go to stdout."""
    parts = urlsplit(upstream)
    proxy = Proxy((parts.hostname or "127.0.0.1", parts.port or 80))
    listen = asyncio.start_server(proxy.serve_client, "127.0.0.1", 0, limit=HEADERS_LIMIT)
    control = asyncio.start_server(proxy.serve_control, "127.0.0.1", 0, limit=2**24)
    servers = [await listen, await control]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    await ended.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
