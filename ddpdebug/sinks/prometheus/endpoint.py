"""The HTTP server of the metrics: our own, because a scraper that is slow, hangs or talks nonsense must cost nothing.

Every connection has its own thread and a time limit, the TLS handshake included; beyond a fixed number of connections
new ones are closed at once. Nothing is ever printed. Runs in daemon threads of a process that trains.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hmac
import io
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

_TRIES = 100
_TIMEOUT = 10.0
_MAX_CONNECTIONS = 32

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Who may scrape, and how it is encrypted. Nothing given: everybody who reaches the address, in the clear.

    Args:
        certificate: PEM file with the certificate chain; turns TLS on.
        key: PEM file with its private key, where it is not in the same file.
        client_ca: PEM file; only clients with a certificate signed by it are served.
        password_file: holds `name:password` on its first line; only who knows them is served.
        every: called about twice a second from the server's thread; must be quick.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    password_file: Path | None = None
    every: Callable[[], None] = lambda: None

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context; raise OSError where a file cannot be used."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def credentials(self) -> bytes | None:
        """Return `name:password`; raise OSError where the file does not hold them."""
        if self.password_file is None:
            return None
        line = self.password_file.read_bytes().partition(b"\n")[0].strip()
        if not line.partition(b":")[2]:
            raise OSError(errno.EINVAL, f"{str(self.password_file)!r} does not hold name:password on its first line")
        return line


class Endpoint:
    """Serves applications by their paths, from its construction on.

    Args:
        port: the first to try; one that is taken moves on to the next. 0 takes any free one.

    Raises:
        OSError: no port is free, the host is not ours, or a file of `serving` cannot be used.
    """

    def __init__(self, apps: Mapping[str, App], host: str, port: int, serving: Serving) -> None:
        context, credentials = serving.context(), serving.credentials()
        self._host, self._owner = host, os.getpid()
        self._server = _bound(host, port)
        self._server.every, self._server.context = serving.every, context
        app = _routed(apps)
        self._server.set_app(app if credentials is None else _protected(app, credentials))
        self.port = self._server.server_port
        self.scheme = "http" if context is None else "https"
        self._thread = threading.Thread(target=self._server.serve_forever, name="ddpdebug-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where others reach it: `host:port`. An endpoint for everybody goes by the name of its node."""
        host = socket.gethostname() if self._host in {"0.0.0.0", "::", ""} else self._host  # noqa: S104 - compared
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def close(self) -> None:
        """Stop serving: at once as a rule, within half a second at worst."""
        if os.getpid() != self._owner:
            return  # a forked child has no server thread to wait for
        stopper = threading.Thread(target=self._server.shutdown, daemon=True)
        stopper.start()
        with suppress(OSError):  # the server looks up twice a second, or when somebody knocks
            socket.create_connection((self._host, self.port), timeout=0.5).close()
        stopper.join(1.0)
        self._server.server_close()
        self._thread.join(1.0)


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the standard library
        """Say nothing: this is somebody else's terminal."""

    def get_stderr(self) -> Any:
        return io.StringIO()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = _MAX_CONNECTIONS
    every: Callable[[], None]
    context: ssl.SSLContext | None = None

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(*args)

    def server_bind(self) -> None:
        """Bind without asking the name service for our own name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def service_actions(self) -> None:
        with suppress(Exception):  # the thread must live on
            self.every()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_TIMEOUT)
        if self.context is None:
            super().finish_request(request, client_address)
            return
        with self.context.wrap_socket(request, server_side=True) as encrypted:  # here, where only this client waits
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Let the client go: it hung up, was too slow, or spoke something else."""


def _bound(host: str, port: int) -> _Server:
    family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    kind = type("_Server", (_Server,), {"address_family": family})
    for tried in range(port, min(port + _TRIES, 65536)):
        try:
            server: _Server = kind((host, tried), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return server
    raise OSError(errno.EADDRINUSE, f"no free port from {port} to {port + _TRIES - 1} on {host!r} for metrics")


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
        except binascii.Error:
            known = b""
        if hmac.compare_digest(known, credentials):
            return app(environ, start_response)
        wanted = [("WWW-Authenticate", 'Basic realm="ddpdebug", charset="UTF-8"')]
        return answer(start_response, "401 Unauthorized", "name and password, please\n", wanted)

    return protected


def json_app(value: Callable[[], Any]) -> App:
    """Return an application that serves what `value` returns as JSON."""

    def app(_: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        return answer(start_response, "200 OK", json.dumps(value()), [("Content-Type", "application/json")])

    return app


def answer(
    start_response: Callable[..., Any], status: str, text: str, headers: Sequence[tuple[str, str]] = ()
) -> list[bytes]:
    """Send a short text."""
    kind = [] if any(name == "Content-Type" for name, _ in headers) else [("Content-Type", "text/plain; charset=utf-8")]
    start_response(status, [*kind, *headers])
    return [text.encode()]
