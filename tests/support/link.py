"""The network between a mount and its store: slow, cut, or silent, as the test says.

Works on bytes, not on requests: it needs to know nothing of HTTP. A delay is added whenever a
client begins to send after the server last spoke, which is once for each request.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from urllib.parse import urlsplit


class Link:
    """A TCP forwarder to one server on this machine. All attributes may be changed at any time."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.delay = 0.0
        """Seconds added to each request."""
        self.rate: float | None = None
        """Bytes a second that all clients together can send; None: as many as they like."""
        self.back_rate: float | None = None
        """Bytes a second that the server can send to each of them."""
        self.silent = False
        """Accept and swallow everything, answer nothing (as a router that drops packets)."""
        self.requests = 0
        """Requests begun so far."""
        self.sent = 0
        """Bytes that clients have sent."""
        self._free_at = 0.0
        self._cut = False
        self._closed = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = self._listen(0)
        self.port = self._listener.getsockname()[1]

    @property
    def endpoint(self) -> str:
        """What clients use instead of the server's own endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Refuse new connections and reset those that exist."""
        self._cut = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop()

    def mend(self) -> None:
        """Forward again."""
        self._cut = False
        self._listener = self._listen(self.port)

    def close(self) -> None:
        self._closed = True
        self.cut()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _drop(self) -> None:
        with self._lock:
            dropped, self._open = list(self._open), set()
        for link in dropped:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._server, timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(server)
        turn = {"server": True}
        back = threading.Thread(target=self._pump, args=(server, client, turn, True), daemon=True)
        back.start()
        self._pump(client, server, turn, False)
        back.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _take_time(self, nbytes: int) -> None:
        """What a line of that rate takes for so many bytes; all clients share it."""
        with self._lock:
            self.sent += nbytes
            if self.rate is None:
                return
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.rate
            pause = self._free_at - time.monotonic()
        time.sleep(max(0.0, pause))

    def _pump(
        self, source: socket.socket, target: socket.socket, turn: dict[str, bool], back: bool
    ) -> None:
        """Copy one direction; `turn` says whether the server spoke last."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                if not back and turn["server"]:
                    self.requests += 1
                    time.sleep(self.delay)
                turn["server"] = back
                if not back:
                    self._take_time(len(data))
                if not self.silent:
                    target.sendall(data)
                if back and self.back_rate is not None:
                    time.sleep(len(data) / self.back_rate)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
