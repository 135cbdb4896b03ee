"""The HTTP server of the metrics: TLS, passwords, and limits, as a scraper must cost the job nothing.

A connection carries one request, as with every exporter in Python. There is a fixed number of them, each with a thread
of its own and with a time limit for everything, its TLS handshake included. However often somebody asks, rendering has
a budget of processor time. Nothing is ever printed.
"""

from __future__ import annotations

import base64
import gzip
import hmac
import io
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from http.client import LineTooLong
from ipaddress import ip_address
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ddpdebug.clock import time
from ddpdebug.isolation.background import Thread
from ddpdebug.sinks.prometheus.listening import Serving, address_of, listen

#: Seconds for a connection, from its acceptance to the end of its answer.
_TIMEOUT = 10.0
#: Waking up costs 0.2 ms of processor time, with nobody there to ask.
_TICK = 2.0
_MAX_CONNECTIONS = 16
_MAX_REQUEST = 1 << 14

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
#: A content type, and what makes it of a text.
Form = tuple[str, Callable[[bytes], bytes]]
#: What a container calls the machine that it runs on.
_CONTAINERS = ("host.docker.internal", "host.containers.internal")
#: Shares of the time that rendering may take in the long run, of one rank and of all ranks (with a large world answers
#: would grow old otherwise), and seconds of it that may be taken at once.
SHARE, SHARE_OF_ALL = 0.005, 0.02
_AT_ONCE = 0.1
#: Up to so many bytes gzip takes its time, which is less than a millisecond.
_SMALL = 1 << 16


class Endpoint:
    """A listening address with WSGI applications by path, serving from its construction on.

    Args:
        port: the first to try; one that is taken moves on to the next. 0 takes any free one but those to avoid.
        listener: serve on this socket instead.

    Raises:
        OSError: no port is free, the host is not ours, or a file of `serving` cannot be used.
    """

    def __init__(
        self,
        apps: Mapping[str, App],
        host: str,
        port: int,
        serving: Serving,
        *,
        listener: socket.socket | None = None,
    ) -> None:
        context, credentials = serving.context(), serving.credentials()
        self._host = host
        listener = listener or listen(host, port, serving)
        self.port = int(listener.getsockname()[1])
        self.scheme = "http" if context is None else "https"
        app = _routed(apps)
        if _is_loopback(listener.getsockname()[0]):
            app = _for_this_machine(app)
        self._server = Server(
            listener, app if credentials is None else _protected(app, credentials), context, serving.every
        )

    @property
    def address(self) -> str:
        """The address for other machines, `host:port`."""
        return address_of(self._host, self.port)

    def close(self) -> None:
        """Stop serving; returns within a second."""
        self._server.close()


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _for_this_machine(app: App) -> App:
    """Refuse requests for other names: a web page whose name was pointed at 127.0.0.1 must not read the metrics.

    Addresses and this machine's names are served, whatever the port: tunnels have others.
    """
    node = socket.gethostname().lower()
    own = {"localhost", node, node.partition(".")[0], *_CONTAINERS}

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        host = str(environ.get("HTTP_HOST", "")).strip().lower()
        name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        if not host or name.rstrip(".") in own or _is_address(name):
            return app(environ, start_response)
        return answer(start_response, "421 Misdirected Request", "ask for an address, localhost or this machine\n")

    return guarded


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _routed(apps: Mapping[str, App]) -> App:
    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        found = apps.get(environ.get("PATH_INFO", ""))
        if found is not None:
            return found(environ, start_response)
        return answer(start_response, "404 Not Found", f"there is {', '.join(apps)}\n")

    return app


def _protected(app: App, credentials: bytes) -> App:
    def protected(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        scheme, _, given = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
        try:
            known = base64.b64decode(given, validate=True) if scheme.lower() == "basic" else b""
        except ValueError:  # not even ASCII, or not base64
            known = b""
        if hmac.compare_digest(known, credentials):
            return app(environ, start_response)
        wanted = [("WWW-Authenticate", 'Basic realm="ddpdebug", charset="UTF-8"')]
        return answer(start_response, "401 Unauthorized", "name and password, please\n", wanted)

    return protected


def json_app(value: Callable[[], Any]) -> App:
    """Return a WSGI application that serves the result of `value` as JSON."""

    def app(_: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        return answer(start_response, "200 OK", json.dumps(value()), [("Content-Type", "application/json")])

    return app


def answer(
    start_response: Callable[..., Any], status: str, text: str, headers: Sequence[tuple[str, str]] = ()
) -> list[bytes]:
    """Begin a WSGI response with a short text; return its body."""
    kind = [] if any(name == "Content-Type" for name, _ in headers) else [("Content-Type", "text/plain; charset=utf-8")]
    start_response(status, [*kind, *headers])
    return [text.encode()]


# --- the budget of rendering ------------------------------------------------------------------------------------------


class Page:
    """A WSGI application that serves one text: rendered anew within a time budget, repeated otherwise.

    Each form in which the same text is asked for is made once, and paid for from the same budget: other headers cost
    no other rendering, and are answered at once.

    Args:
        take: returns the text as it is now; called by one thread at a time.
        form: returns for a request the content type, and what makes it of the text.
        share: of the time that rendering may take in the long run.
        clock: what passes, seconds.
        spent: processor time of the calling thread, seconds.
    """

    def __init__(
        self,
        take: Callable[[], bytes],
        form: Callable[[Mapping[str, Any]], Form],
        share: float = SHARE,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._take, self._form, self._share, self._clock, self._spent = take, form, share, clock, spent
        self._credit, self._since = _AT_ONCE, clock()
        self._forms: dict[tuple[str, bool], bytes] = {}  # of one text
        self._text: bytes | None = None
        self._working = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a WSGI request."""
        if environ.get("REQUEST_METHOD", "GET") != "GET":
            return answer(start_response, "405 Method Not Allowed", "only GET is answered\n", [("Allow", "GET")])
        kind, make = self._form(environ)
        packed = _takes_gzip(str(environ.get("HTTP_ACCEPT_ENCODING", "")))
        body = self._forms.get((kind, packed))
        if self._working.acquire(blocking=body is None):  # who can be answered does not wait
            try:
                body = self._current(kind, make, packed=packed)
            finally:
                self._working.release()
        assert body is not None
        start_response("200 OK", [("Content-Type", kind), *([("Content-Encoding", "gzip")] if packed else [])])
        return [body]

    def forget(self) -> None:
        """Render the text anew for the next request."""
        with self._working:
            self._text, self._forms, self._credit = None, {}, _AT_ONCE

    def _current(self, kind: str, make: Callable[[bytes], bytes], *, packed: bool) -> bytes:
        now, begun = self._clock(), self._spent()
        self._credit = min(_AT_ONCE, self._credit + self._share * (now - self._since))
        self._since = now
        try:
            if self._text is None or self._credit > 0:
                self._text, self._forms = self._take(), {}
            forms, plain, wanted = self._forms, (kind, False), (kind, packed)
            if plain not in forms:
                forms[plain] = make(self._text)
            if wanted not in forms:
                forms[wanted] = gzip.compress(forms[plain], 9 if len(forms[plain]) <= _SMALL else 6)
            return forms[wanted]
        finally:
            self._credit -= self._spent() - begun


def _takes_gzip(accept: str) -> bool:
    found = (part.partition(";") for part in accept.lower().split(","))
    return any(name.strip() == "gzip" and more.replace(" ", "") not in {"q=0", "q=0.0"} for name, _, more in found)


# --- connections ------------------------------------------------------------------------------------------------------


class _Head:
    """The input of a connection, cut off at the size that the head of a request may have."""

    def __init__(self, file: Any) -> None:
        self.close, self._readline, self._left = file.close, file.readline, _MAX_REQUEST

    def readline(self, limit: int) -> bytes:
        line: bytes = self._readline(min(limit, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("request")
        return line


class _Handler(WSGIRequestHandler):
    """The HTTP handler of one connection."""

    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Read no more than a request may have."""
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def log_message(self, *_: Any) -> None:
        """Drop the log line: the terminal is the job's."""

    def get_stderr(self) -> Any:
        """Drop what an application that fails would print."""
        return io.StringIO()


class Server(WSGIServer):
    """A WSGI server on a listening socket, with a daemon thread for each connection; serves once constructed.

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
        self._thread = Thread("ddpdebug-metrics", self._run)

    def close(self) -> None:
        """Stop serving; returns within a second."""
        self._closing.set()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._thread.join(1.0)
        self.socket.close()

    def _run(self) -> None:
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
        """Accept a connection. The TLS handshake takes place in the connection's own thread."""
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
        """Whether one more connection is within the limit."""
        del client_address
        if len(self._open) >= _MAX_CONNECTIONS:
            return False
        self._open[request] = time.monotonic() + _TIMEOUT
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread."""
        Thread("ddpdebug-metrics", self._answer, request, client_address)

    def _answer(self, request: Any, client_address: Any) -> None:
        with suppress(Exception):  # it hung up, was too slow, or spoke something else
            self.finish_request(request, client_address)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop the error: the terminal belongs to the job."""
