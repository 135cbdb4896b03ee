"""The address on which a rank listens for ranks of other hosts: that by which it reaches the job's store. Torch-free.

By default gloo asks for the address of the host's own name. That name may not resolve, or as 127.0.1.1, and then nobody
else comes through, while a job whose own backend is not gloo is well.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

#: The port that throws away what it is sent; nothing is.
_DISCARD = 9


def address_towards(host: str) -> str:
    """Return this host's address on the route to another host; empty if unknown."""
    if not host:
        return ""
    with suppress(OSError, UnicodeError):
        for family, place in _places(host):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.connect(place)  # of a datagram socket: looks for the way and sends nothing
                return str(asking.getsockname()[0])
    return ""


def _places(host: str) -> list[tuple[int, Any]]:
    """Return the families and addresses of a host.

    No name is resolved where none needs to be: that may take long.
    """
    numeric = "127.0.0.1" if host == "localhost" else host
    with suppress(ValueError):  # a name, or an address with a scope
        version = ip_address(numeric if "%" not in numeric else "").version
        return [(socket.AF_INET if version == 4 else socket.AF_INET6, (numeric, _DISCARD))]
    return [(family, place) for family, *_, place in socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)]


def elsewhere(addresses: Iterable[str]) -> str:
    """Return a rank's address that other hosts reach; empty if all ranks seem to be on one host."""
    known = set(addresses)
    return min((one for one in known if not _is_local(one)), default="") if len(known) > 1 else ""


def listening_address(own: str, other: str) -> str:
    """Return the address on which a rank listens; empty: gloo's default.

    Args:
        own: from which it reaches the store, whose host may know itself by a name that only it understands.
        other: `elsewhere`.
    """
    return address_towards(other) if other and _is_local(own) else own if other else ""


def _is_local(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return True
