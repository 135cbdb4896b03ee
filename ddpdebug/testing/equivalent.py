"""Assertion that the ranks of a test train like one process."""

from __future__ import annotations

import torch

from ddpdebug.ci.equivalence import Build, judge, measure
from ddpdebug.schema.finding import Severity
from ddpdebug.sinks.text import parts
from ddpdebug.testing.meeting import Meeting


def assert_equivalent(
    build: Build, *, steps: int = 3, device: torch.device | None = None, timeout: float = 30.0
) -> None:
    """Assert that the ranks of the default group train like one process on the same global batch.

    Args:
        build: returns `model, loss_fn, batch`; see `ddpdebug.ci.equivalence`.
        steps: how many optimizer steps to compare.
        device: of this rank, where the factory's model is put; the CPU by default.
        timeout: seconds to wait for the other ranks before and after the measurement.
    """
    meeting = Meeting("assert_equivalent(...)", timeout)
    meeting.tell_json("here")
    facts = meeting.tell_json(measure(build, steps=steps, device=device))
    for finding in judge(dict(enumerate(facts))):
        if finding.severity > Severity.INFO:
            lines = [f"{label}: {line}" for label, own in parts(finding, meeting.world) for line in own]
            raise AssertionError("\n".join([f"{finding.code} {finding.title}", *lines]))
