"""HTTP for scrapers: the standard library's server, with limits, for a scraper must cost the training nothing.

A connection carries one request, as with every exporter in Python. There is a fixed number of them, each with a thread
of its own and with a time limit for everything, its TLS handshake included. Nothing is ever printed.
"""

from __future__ import annotations

import io
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.client import LineTooLong
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

#: Seconds for a connection, from its acceptance to the end of its answer.
_TIMEOUT = 10.0
#: Waking up costs 0.2 ms of processor time, with nobody there to ask.
_TICK = 2.0
_MAX_CONNECTIONS = 16
_MAX_REQUEST = 1 << 14

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Head:
    """A file that holds no more than the head of a request may have."""

    def __init__(self, file: Any) -> None:
        self.close, self._readline, self._left = file.close, file.readline, _MAX_REQUEST

    def readline(self, limit: int) -> bytes:
        line: bytes = self._readline(min(limit, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("request")
        return line


class _Handler(WSGIRequestHandler):
    """Answers the request of one connection."""

    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Read no more than a request may have."""
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def log_message(self, *_: Any) -> None:
        """Say nothing: this is somebody else's terminal."""

    def get_stderr(self) -> Any:
        """Drop what an application that fails would print."""
        return io.StringIO()


class Server(WSGIServer):
    """Serves who connects to a listening socket, in daemon threads, from its construction on.

    Args:
        listener: bound and listening; closed by `close`.
        app: called in a thread for each request.
        every: called every two seconds or so in a thread; must be quick, may fail.
    """

    timeout = _TICK  # of `handle_request`

    def __init__(
        self, listener: socket.socket, app: App, context: ssl.SSLContext | None, every: Callable[[], None]
    ) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        listener.settimeout(_TICK)  # who has gone again before he was accepted is not waited for
        self.server_name, self.server_port = listener.getsockname()[:2]  # not asked of the name service
        self.setup_environ()
        self.set_app(app)
        self._context, self._every = context, every
        self._closing = threading.Event()
        self._open: dict[Any, float] = {}  # connections, with the time of each one's end
        self._thread = self._start(self._run)

    def close(self) -> None:
        """Stop serving; returns within a second."""
        self._closing.set()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._thread.join(1.0)
        self.server_close()

    @staticmethod
    def _start(call: Callable[..., None], *args: Any) -> threading.Thread:
        # a name, so that the job's own threads are numbered as without us
        thread = threading.Thread(target=call, args=args, name="ddpdebug-metrics", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        # to write to who has gone would end a job that has SIGPIPE back at its default; the other threads inherit it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        due = 0.0
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= due:
                due = now + _TICK
                with suppress(Exception):  # the thread must live on
                    self._every()
                self._hang_up(now)
            try:
                self.handle_request()
            except Exception:  # noqa: BLE001 - the thread must live on
                self._closing.wait(_TICK)
        self._hang_up(float("inf"))

    def _hang_up(self, now: float) -> None:
        for connection, end in self._open.copy().items():
            if end <= now:
                with suppress(OSError):  # it has ended itself
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Its handshake begins with what its own thread reads."""
        try:
            client, address = self.socket.accept()
        except OSError:  # no more files: who waits goes on waiting, and this would ask without a pause
            self._closing.wait(_TICK)
            raise
        client.settimeout(_TIMEOUT)
        if self._context is not None:
            client = self._context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return client, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Tell whether there is a place for one more."""
        del client_address
        if len(self._open) >= _MAX_CONNECTIONS:
            return False
        self._open[request] = time.monotonic() + _TIMEOUT
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of the connection's own; where there can be no more threads the client is let go."""
        self._start(self._answer, request, client_address)

    def _answer(self, request: Any, client_address: Any) -> None:
        with suppress(Exception):  # it hung up, was too slow, or spoke something else
            self.finish_request(request, client_address)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing."""
