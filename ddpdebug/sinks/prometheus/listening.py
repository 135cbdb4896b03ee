"""The settings of a metrics endpoint, and its listening socket. Torch-free, and quick to load.

A port is there, and known, before what serves at it is loaded: who connects in between waits.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

_TRIES = 100
#: The files of `Serving`, by field.
_FILES = ("certificate", "key", "client_ca", "password_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """TLS and authentication of the endpoint. By default plain HTTP for everybody who reaches the address.

    Args:
        certificate: PEM file with the certificate chain; turns TLS on.
        key: PEM file with its private key, where it is not in the same file.
        client_ca: PEM file; only clients with a certificate signed by it are served.
        password_file: holds `name:password` on its first line; only who knows them is served.
        every: called every two seconds or so from the server's thread; must be quick.
        avoid: ports that the job will want, which are not taken where the system chooses one.
        ask: called with a port that is taken; makes who holds it leave, and returns whether he did.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    password_file: Path | None = None
    every: Callable[[], None] = lambda: None
    avoid: frozenset[int] = frozenset()
    ask: Callable[[int], bool] = lambda _: False

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context; raise OSError if a file cannot be used."""
        if self.certificate is None:
            return None
        import ssl  # noqa: PLC0415 - it is large, and few have a certificate

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @classmethod
    def of(cls, files: Mapping[str, str | None]) -> Serving:
        """Return the settings from a mapping of file names."""
        certificate, key, client_ca, password = (
            None if (file := files[name]) is None else Path(file) for name in _FILES
        )
        return cls(certificate=certificate, key=key, client_ca=client_ca, password_file=password)

    def files(self) -> dict[str, str | None]:
        """Return the file names of these settings, by field."""
        return {name: None if (file := getattr(self, name)) is None else str(file.absolute()) for name in _FILES}

    def credentials(self) -> bytes | None:
        """Return `name:password`; raise OSError if the file is malformed."""
        if self.password_file is None:
            return None
        line = self.password_file.read_bytes().partition(b"\n")[0].strip()
        if not line.partition(b":")[2]:
            raise OSError(errno.EINVAL, f"{str(self.password_file)!r} does not hold name:password on its first line")
        return line


def listen(host: str, port: int, serving: Serving) -> socket.socket:
    """Return a listening socket: on the port or the next free one; on any port for 0.

    Raises:
        OSError: no port is free, or the host is not ours.
    """
    return _bound(host, port, serving.ask) if port else _anywhere(host, serving.avoid)


def _bound(host: str, port: int, ask: Callable[[int], bool] = lambda _: False) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    for tried in range(port, min(port + _TRIES, 65536)):
        listener = _listening(family, (place[0], tried, *place[2:]))
        if listener is None and ask(tried):
            listener = _listening(family, (place[0], tried, *place[2:]))
        if listener is not None:
            return listener
    raise OSError(errno.EADDRINUSE, f"no free port from {port} to {port + _TRIES - 1} on {host!r} for metrics")


def _listening(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket | None:
    """Return a listening socket, None where the port is taken; raise OSError for what else is wrong."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


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


def address_of(host: str, port: int) -> str:
    """Return the address for other machines, `host:port`; the node's host name if all interfaces are bound."""
    host = socket.gethostname() if host in {"0.0.0.0", "::", ""} else host  # noqa: S104 - compared
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- the port of a run that has ended ---------------------------------------------------------------------------------


def ask_to_leave(port: int) -> bool:
    """Ask an ended run of this user to release a port for a new one; return whether it did."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(2.0)
        asking.connect(_door(port))
        return not asking.recv(1)
    return False


def listen_for_heirs(port: int) -> list[socket.socket]:
    """Return the socket on which a later run asks for the port; an empty list if another process has it."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(_door(port))
        door.listen(1)
    except OSError:
        door.close()
        return []
    return [door]


def _door(port: int) -> str:
    return f"\0ddpdebug-port-{os.getuid()}-{port}"  # an abstract address: in the network namespace, like the port
