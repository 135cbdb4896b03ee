"""HTTP for scrapers, in one thread: a scraper that is slow, hangs or talks nonsense must cost training nothing.

Connections stay open between scrapes, as Prometheus likes them: accepting one costs more than an answer. Each has a
time limit, its TLS handshake included, and there is a fixed number of them. Nothing is ever printed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

#: Seconds for a handshake, a request or the reading of an answer, and until an idle connection is closed: scrapes may
#: be two minutes apart.
_TIMEOUT, _IDLE = 10.0, 180.0
#: Waking up costs 0.2 ms of processor time, with nobody there to ask.
_TICK = 2.0
_MAX_CONNECTIONS = 32
_MAX_REQUEST = 1 << 14

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Connection(asyncio.Protocol):
    """One client: reads requests without a body, one at a time, and answers them."""

    def __init__(self, app: App, now: Callable[[], float], closed: Callable[[Connection], None]) -> None:
        self._app, self._now, self._closed = app, now, closed
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self.since = now()
        self.answered = False

    @property
    def idle(self) -> bool:
        """Tell whether an answer was taken, and nothing asked since."""
        sent = self._transport is not None and not self._transport.get_write_buffer_size()
        return self.answered and sent and not self._buffer

    def expired(self) -> bool:
        """Tell whether it has used up its time."""
        return self._now() - self.since > (_IDLE if self.idle else _TIMEOUT)

    def abort(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, after the handshake where there is one."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place."""
        self._closed(self)

    def data_received(self, data: bytes) -> None:
        """Answer when the request is complete."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        # who asks again and again and reads nothing would fill the memory; TLS itself may have a little to say
        if self.answered and self._transport.get_write_buffer_size() > _MAX_REQUEST:
            self.abort()
            return
        if not self._buffer:
            self.since = self._now()
        head, end, rest = (self._buffer + data).partition(b"\r\n\r\n")
        self._buffer = head + end + rest
        if len(head) > _MAX_REQUEST:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif end:
            # who asks again before the answer is out gets one answer
            self._buffer = b""
            self._answer(head.decode("latin-1"), last=bool(rest))
            self.answered, self.since = True, self._now()

    def _answer(self, head: str, *, last: bool) -> None:
        line, *fields = head.split("\r\n")
        method, _, rest = line.partition(" ")
        target, _, version = rest.rpartition(" ")
        if not version.startswith("HTTP/1.") or not target.startswith("/"):
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        if method not in {"GET", "HEAD"}:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)
            return
        path, _, query = target.partition("?")
        environ: dict[str, Any] = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": query}
        for field in fields:
            name, _, value = field.partition(":")
            environ["HTTP_" + name.upper().replace("-", "_")] = value.strip()
        last = last or version == "HTTP/1.0" or "close" in environ.get("HTTP_CONNECTION", "").lower()
        last = last or "HTTP_CONTENT_LENGTH" in environ or "HTTP_TRANSFER_ENCODING" in environ
        given: list[Any] = []
        try:
            body = b"".join(self._app(environ, lambda status, headers: given.extend((status, headers))))
            status, headers = given
        except Exception:  # noqa: BLE001 - a scrape that fails is not the job's concern
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._send(status, headers, body, last=last, only_head=method == "HEAD")

    def _refuse(self, status: HTTPStatus) -> None:
        text = f"{status.phrase}\n".encode()
        self._send(f"{status.value} {status.phrase}", [("Content-Type", "text/plain")], text, last=True)

    def _send(
        self, status: str, headers: Iterable[tuple[str, str]], body: bytes, *, last: bool, only_head: bool = False
    ) -> None:
        assert self._transport is not None
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
        lines += [f"Content-Length: {len(body)}", f"Connection: {'close' if last else 'keep-alive'}", "\r\n"]
        self._transport.write("\r\n".join(lines).encode("latin-1", "replace") + (b"" if only_head else body))
        if last:
            self._transport.close()


class Server:
    """Accepts connections from a listening socket and serves them in a daemon thread of its own.

    Args:
        listener: bound and listening; closed by `close`.
        app: called in the thread for each request (WSGI; only what a GET without a body needs is in its environ).
        every: called every two seconds or so in the thread; must be quick, may fail.
    """

    def __init__(
        self, listener: socket.socket, app: App, context: ssl.SSLContext | None, every: Callable[[], None]
    ) -> None:
        self._listener, self._app, self._context, self._every = listener, app, context, every
        listener.setblocking(False)
        self._welcoming: set[asyncio.Task[Any]] = set()
        self._connections: set[Connection] = set()
        # not the policy's loop: what the job has chosen for itself is none of ours
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(lambda *_: None)
        self._loop.set_debug(False)
        self._thread = threading.Thread(target=self._run, name="ddpdebug-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; returns within a second."""
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        self._listener.close()

    def _run(self) -> None:
        self._tick()
        try:
            self._loop.run_forever()
        finally:
            self._loop.remove_reader(self._listener)
            for connection in tuple(self._connections):
                connection.abort()
            for task in self._welcoming:
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))  # what was hung up is let go
            self._loop.close()

    def _tick(self) -> None:
        with suppress(Exception):  # the thread must live on
            self._every()
        for connection in [known for known in self._connections if known.expired()]:
            connection.abort()
        self._loop.add_reader(self._listener, self._accept)  # once more, where it was taken away
        self._loop.call_later(_TICK, self._tick)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # who wanted to come has gone
            return
        except OSError:  # no more files: who waits goes on waiting, and the loop would ask without a pause
            self._loop.remove_reader(self._listener)
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            idle = [known for known in self._connections if known.idle]
            if not idle:
                client.close()
                return
            min(idle, key=lambda known: known.since).abort()
        connection = Connection(self._app, self._loop.time, self._connections.discard)
        self._connections.add(connection)
        task = self._loop.create_task(self._welcome(client, connection))
        self._welcoming.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._welcoming.discard)

    async def _welcome(self, client: socket.socket, connection: Connection) -> None:
        client.setblocking(False)
        limit = None if self._context is None else _TIMEOUT
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, client, ssl=self._context, ssl_handshake_timeout=limit, ssl_shutdown_timeout=limit
            )
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - it spoke something else, or was too slow
            self._connections.discard(connection)
            client.close()
