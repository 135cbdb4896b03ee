"""Where a rank listens, from what the ranks know of each other."""

from __future__ import annotations

import socket

import pytest

from ddpdebug.exchange.addresses import address_towards, elsewhere, listening_address


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        (["127.0.0.1"] * 4, ""),
        (["10.0.0.1"] * 4, ""),
        (["", ""], ""),
        (["127.0.0.1", "127.0.0.1", "10.0.0.2", "10.0.0.3"], "10.0.0.2"),
        (["::1", "fd00::2"], "fd00::2"),
        (["127.0.0.1", "127.0.1.1"], ""),
    ],
)
def test_an_address_that_other_hosts_reach(addresses: list[str], found: str) -> None:
    """Ranks that all reach the store from the same address are on one host."""
    assert elsewhere(addresses) == found


def test_on_one_host_gloo_chooses_by_itself() -> None:
    """And on several the way to the store counts, or on its host the way to another one."""
    assert listening_address("10.0.0.1", "") == ""
    assert listening_address("10.0.0.1", "10.0.0.2") == "10.0.0.1"
    assert listening_address("127.0.0.1", "127.0.0.5") == "127.0.0.1"


def test_the_address_towards_a_host() -> None:
    """A name that does not resolve is none."""
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("") == address_towards("no.such.host.invalid") == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_no_name_is_resolved_on_one_host(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Resolving may take long."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("resolved"))
    assert address_towards(host) in {"127.0.0.1", "::1", ""}
