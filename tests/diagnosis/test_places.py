"""Host and device of a finding's ranks, as the ranks have announced them."""

from __future__ import annotations

from dataclasses import replace

from ddpdebug.diagnosis.places import Places
from ddpdebug.schema.announcements import Device, Place
from ddpdebug.schema.finding import Finding, Severity

FOUND = Finding(code="RANK104", severity=Severity.CRITICAL, title="settings differ", ranks=(1, 2))


def _places(*nodes: str) -> Places:
    places = Places()
    for rank, node in enumerate(nodes):
        places.hear(rank, Place(node=node, local_rank=rank % 2))
    return places


def test_several_hosts_are_named_with_the_device_where_that_is_known() -> None:
    """What a rank says of its GPU does not take the place of what it has said of its host."""
    places = _places("node-a", "node-a", "node-b", "node-b")
    places.hear(2, Device(gpu_uuid="GPU-7", device="cuda:0"))
    [(finding, new)] = places.named([(FOUND, True)])
    assert new
    assert finding.places == {"1": "node-a", "2": "node-b, cuda:0"}
    assert Finding.from_json(finding.to_json()) == finding


def test_one_host_is_not_named() -> None:
    """Its findings are written as they always were."""
    [(finding, _)] = _places("node-a", "node-a", "node-a").named([(FOUND, True)])
    assert finding == FOUND
    assert "places" not in finding.to_json()


def test_on_one_host_the_device_of_a_single_rank_is_named() -> None:
    """It may be broken; of several ranks it says nothing."""
    places = _places("node-a", "node-a")
    places.hear(1, Device(gpu_uuid="GPU-7", device="cuda:1"))
    found = places.named([(replace(FOUND, ranks=(1,)), True), (FOUND, True)])
    assert [finding.places for finding, _ in found] == [{"1": "cuda:1"}, {}]


def test_a_rank_that_has_said_nothing_has_no_place() -> None:
    """One of another host may fail before it says where it is."""
    [(finding, _)] = _places("node-a", "node-b").named([(FOUND, False)])
    assert finding.places == {"1": "node-b"}
