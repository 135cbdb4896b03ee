"""Which entries of the optimizer's state differ."""

from __future__ import annotations

from ddpdebug.detectors.examples import step_at, tables
from ddpdebug.detectors.rank.rank103_optimizer_state_differs import OptimizerStateDiffers


def test_a_parameter_may_be_called_norms() -> None:
    """Its state is compared like that of others; the norms themselves are no state."""
    usual = {"norms": {"exp_avg": "a"}, "w": {"exp_avg": "b"}, "": {"norms:exp_avg": 1.0, "w:exp_avg": 2.0}}
    odd = {**usual, "norms": {"exp_avg": "f"}, "": {"norms:exp_avg": 3.0, "w:exp_avg": 2.0}}
    step = step_at(3, odd={1: {"state_digest": 5, "params_after_digest": 6}}, state=tables(4, usual, {1: odd}))
    for tolerance, subjects in ((None, [("norms:exp_avg",)]), (0.1, [("norms:exp_avg",)]), (10.0, [])):
        found = OptimizerStateDiffers({"tolerance": tolerance}).detect(step)
        assert [finding.subject for finding in found] == subjects
