"""When growing memory is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpdebug.detectors.examples import growing, holders
from ddpdebug.detectors.mem.mem406_host_memory_growth import HostMemoryGrowth
from ddpdebug.detectors.mem.sizes import GIB, MIB
from ddpdebug.schema.finding import Finding


def _told(steps: Sequence[Any]) -> tuple[list[Finding], list[Finding]]:
    rule = HostMemoryGrowth()
    return [finding for step in steps for finding in rule.detect(step)], list(rule.finish())


def test_growth_that_lasts_to_the_end_is_told_there() -> None:
    """With the holder that was found on the way, however far the limit is."""
    steps = growing("host_private_bytes", lambda i: 300 * MIB + MIB * i, 120, holders=holders("seen"), limit=64 * GIB)
    during, at_the_end = _told(steps)
    assert not during
    assert [finding.subject for finding in at_the_end] == [("seen",)]


def test_growth_that_has_ended_is_not_told() -> None:
    """A cache that has filled."""
    steps = growing("host_private_bytes", lambda i: 300 * MIB + MIB * min(i, 160), 240, limit=64 * GIB)
    assert _told(steps) == ([], [])


def test_growth_that_threatens_is_told_while_it_goes_on() -> None:
    """It would reach the limit before long."""
    during, _ = _told(growing("host_private_bytes", lambda i: 300 * MIB + MIB * i, 120, limit=GIB))
    assert {finding.code for finding in during} == {"MEM406"}
