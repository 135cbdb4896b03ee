"""Whose failure it is."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ddpdebug.pytest_plugin.worker import is_lost_peer


@pytest.mark.parametrize(
    "message",
    [
        "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41",
        "Read error [127.0.0.1]:1: Connection reset by peer",
        "[../buffer.cc:72] Timed out waiting 1800000ms for recv operation to complete",
        "Broken pipe",
    ],
)
def test_a_lost_connection_is_an_echo(message: str) -> None:
    """Also when it is raised again as something else."""
    error = RuntimeError(message)
    assert is_lost_peer(error)
    wrapped = ValueError("training failed")
    wrapped.__cause__ = error
    assert is_lost_peer(wrapped)
    assert is_lost_peer(dist.DistNetworkError("recv failed"))


def test_an_own_failure_is_not() -> None:
    """Even one that quotes such words, or replaces such an error on purpose."""
    assert not is_lost_peer(AssertionError("connection closed by peer"))
    assert not is_lost_peer(RuntimeError("shapes do not match"))
    assert not is_lost_peer(None)
    replaced = ValueError("mine")
    replaced.__context__ = RuntimeError("Broken pipe")
    assert is_lost_peer(replaced)
    replaced.__suppress_context__ = True
    assert not is_lost_peer(replaced)


def test_a_ring_of_causes_ends() -> None:
    """Exceptions may refer to each other."""
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert not is_lost_peer(one)
