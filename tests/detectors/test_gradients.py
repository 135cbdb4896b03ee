"""Who is to blame for gradients that differ."""

from __future__ import annotations

import pytest

from ddpdebug.detectors.examples import contract, gradients, step_at
from ddpdebug.detectors.sync.sync206_changed_after_reduction import ChangedAfterReduction


@pytest.mark.parametrize(
    "now, ranks",
    [((1.0, 3.0), (1,)), ((0.5, 1.0), (0,)), ((0.5, 0.25), (0, 1)), ((1.0, 1.0), (0, 1))],
    ids=["the second grew", "the first shrank", "both changed", "a permutation"],
)
def test_of_two_ranks_the_one_whose_gradient_changed_is_named(now: tuple[float, float], ranks: tuple[int, ...]) -> None:
    """There is no majority among two, but one of them still has what the reduction left."""
    details = gradients(2, {1: {"w": "ff"}}, reduced_sums={"w": 1.0}, reduced_norms={"w": 1.0})
    for rank, norm in enumerate(now):
        details[rank]["step_norms"] = {"w": norm}
    step = step_at(6, world=2, odd={1: {"grads_digest": 5}}, gradients=details, contract=contract(2))
    (finding,) = ChangedAfterReduction().detect(step)
    assert finding.ranks == ranks
