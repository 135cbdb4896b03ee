"""Where the metrics are served: addresses, paths, TLS and passwords."""

from __future__ import annotations

import base64
import errno
import hmac
import json
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ddpdebug.sinks.prometheus.connections import App, Server

_TRIES = 100
#: What a container calls the machine that it runs on.
_CONTAINERS = ("host.docker.internal", "host.containers.internal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Who may scrape, where, and how it is encrypted. Nothing given: everybody who reaches the address, in the clear.

    Args:
        certificate: PEM file with the certificate chain; turns TLS on.
        key: PEM file with its private key, where it is not in the same file.
        client_ca: PEM file; only clients with a certificate signed by it are served.
        password_file: holds `name:password` on its first line; only who knows them is served.
        every: called every two seconds or so from the server's thread; must be quick.
        avoid: ports that the job will want, which are not taken where the system chooses one.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    password_file: Path | None = None
    every: Callable[[], None] = lambda: None
    avoid: frozenset[int] = frozenset()

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
        port: the first to try; one that is taken moves on to the next. 0 takes any free one but those to avoid.

    Raises:
        OSError: no port is free, the host is not ours, or a file of `serving` cannot be used.
    """

    def __init__(self, apps: Mapping[str, App], host: str, port: int, serving: Serving) -> None:
        context, credentials = serving.context(), serving.credentials()
        self._host, self._owner = host, os.getpid()
        listener = _bound(host, port) if port else _anywhere(host, serving.avoid)
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
        """Where others reach it: `host:port`. An endpoint for everybody goes by the name of its node."""
        host = socket.gethostname() if self._host in {"0.0.0.0", "::", ""} else self._host  # noqa: S104 - compared
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def close(self) -> None:
        """Stop serving; returns within a second."""
        if os.getpid() == self._owner:  # a forked child has no server thread to wait for
            self._server.close()


def _bound(host: str, port: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    for tried in range(port, min(port + _TRIES, 65536)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((place[0], tried, *place[2:]))
            listener.listen()
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    raise OSError(errno.EADDRINUSE, f"no free port from {port} to {port + _TRIES - 1} on {host!r} for metrics")


def _anywhere(host: str, avoid: frozenset[int]) -> socket.socket:
    """Return a socket on a port that the system chooses; one to avoid is held until another one is found."""
    held = []
    try:
        for _ in range(len(avoid) + 1):
            listener = _bound(host, 0)
            if listener.getsockname()[1] not in avoid:
                return listener
            held.append(listener)
    finally:
        for other in held:
            other.close()
    raise OSError(errno.EADDRINUSE, f"no free port on {host!r} for metrics")


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
