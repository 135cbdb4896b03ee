"""Slow ranks of very many, of which each step has some chosen rows."""

from __future__ import annotations

import pytest

from ddpdebug.detectors.slow.slow601_straggler import Straggler
from ddpdebug.detectors.slow.timing import job, timing_of
from ddpdebug.exchange.partial import Partial
from ddpdebug.monitor.many_ranks import chosen_step
from ddpdebug.schema.row import encode
from ddpdebug.schema.step import Step

_WORLD = 40


def _chosen(step: Step) -> Step:
    whole = Partial()
    for row in step.rows.values():
        whole.add_row(encode(row))
    ((key, part),) = whole.steps.items()
    return chosen_step(key, part)


@pytest.mark.parametrize("slow", [None, 5, 23])
def test_a_slow_rank_is_named_by_chosen_rows(slow: int | None) -> None:
    """With its phase, and nobody where all are alike."""
    steps = job(200, world=_WORLD, noise=0.05, more=lambda _, rank, phase: 0.02 * (rank == slow and phase == "forward"))
    rule = Straggler()
    found = [finding for step in steps for finding in rule.detect(_chosen(step))]
    assert {finding.ranks for finding in found} == (set() if slow is None else {(slow,)})
    assert all(finding.phase == "forward" for finding in found)


def test_whole_steps_between_chosen_ones_change_nothing() -> None:
    """All have the same ranks in the same places."""
    steps = job(200, world=_WORLD, more=lambda _, rank, phase: 0.02 * (rank == 31 and phase == "backward"))
    mixed = [step if number % 10 == 0 else _chosen(step) for number, step in enumerate(steps)]
    timings = [timing_of(step) for step in mixed]
    assert {timing.ranks for timing in timings if timing is not None} == {tuple(range(_WORLD))}
    rule = Straggler()
    found = [finding for step in mixed for finding in rule.detect(step)]
    assert {(finding.ranks, finding.phase) for finding in found} == {((31,), "backward")}
