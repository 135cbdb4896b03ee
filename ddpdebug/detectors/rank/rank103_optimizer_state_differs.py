"""RANK103: the optimizers of the ranks remember different things."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.comparison import (
    CLASS_COLUMNS,
    MAX_NAMES,
    agree_within,
    are_own,
    blame,
    classes_of,
    made_alike,
    named,
    parted_over,
    subset,
    values_of,
)
from ddpdebug.detectors.examples import step_at, steps, tables as ranks
from ddpdebug.detectors.kinds import ComparisonRule, Examples, Fields, Finding, Findings, RankClasses, Severity, Step
from ddpdebug.schema.details import OptimizerState, differing_names, is_part
from ddpdebug.schema.row import Flag

_ON_PURPOSE = Flag.LOCAL_ONLY | Flag.SHARDED_STATE
_USUAL: dict[str, Any] = {"w": {"exp_avg": "a", "step": "3"}, "b": {"exp_avg": "b", "step": "3"}}
_ODD: dict[str, Any] = {"w": {"exp_avg": "f", "step": "3"}, "b": {"exp_avg": "b", "step": "3"}}
_PARTED: dict[str, Any] = {"state_digest": 5, "params_after_digest": 6}
_OWNED: dict[int, Any] = {rank: {f"{rank}.weight": {"momentum": "a"}} for rank in range(4)}
_SHARDED: dict[str, Any] = {
    "flags": Flag.SHARDED | Flag.NO_DDP,
    "state_digest": 0,
    "class_0_key": 11,
    "class_0_params": 5,
    "class_0_state": 7,
}


class OptimizerStateDiffers(ComparisonRule):
    """The optimizer's state (momentum, second moments, step counters) differs between ranks, and so does what it made.

    State from which the ranks come to equal parameters is each rank's own on purpose: an optimizer that splits it over
    the ranks, and gathers what it has updated (Muon, Shampoo). So is state that a rank does not have at all.

    Impact: equal gradients become unequal updates for as long as the state differs, so the parameters part too.

    Diagnosis: the subject names parameter and state key. Print `optimizer.state[p]["exp_avg"].sum()` (or the key in
    question) on every rank after each step and find the first step that differs. If only `step` differs, a rank took
    another number of steps.

    Causes:
    - `optimizer.load_state_dict` on resume on some ranks only, or from files that differ
    - state cleared or edited on one rank: momentum reset after a bad batch, `optimizer.state.clear()`, a new optimizer
    - parameters added to the optimizer at different times (`add_param_group` behind a condition)
    - an optimizer whose state depends on the rank: own random numbers, own loss values

    Remedy:
    - load model and optimizer on every rank from the same file, with `map_location`
    - take decisions about the optimizer on all ranks alike: all-reduce the flag first
    - to repair a run, save rank 0's optimizer state and load it everywhere, together with rank 0's parameters
    """

    code = "RANK103"
    severity = Severity.CRITICAL
    title = "optimizer state differs between ranks"
    reads = ("state_digest", *CLASS_COLUMNS["state"], Flag.STATE_CHANGED_OUTSIDE)
    of_several = True
    wants = ("state",)
    fires_on = Examples(
        lambda: step_at(2, **_SHARDED, odd={2: {"class_0_params": 6, "class_0_state": 9}}),
        lambda: step_at(22, odd={2: _PARTED}, state=ranks(4, _USUAL, {2: _ODD})),
        lambda: step_at(1, world=2, odd={1: {**_PARTED, "flags": Flag.STATE_CHANGED_OUTSIDE}}),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(2, flags=Flag.SHARDED_STATE, odd={rank: {"state_digest": 5 + rank} for rank in range(4)}),
        lambda: step_at(2, **_SHARDED, odd={rank: {"class_0_key": 12, "class_0_state": 8} for rank in (1, 3)}),
        lambda: step_at(2, flags=Flag.LOCAL_ONLY, odd={1: _PARTED}),
        lambda: step_at(2, odd={rank: {"state_digest": 5 + rank} for rank in range(4)}),  # gathered: equal parameters
        lambda: (step_at(2, odd={1: {"state_digest": 5}}), step_at(3, odd={1: _PARTED})),  # ... and once not: RANK101
        lambda: step_at(0, odd={rank: {**_PARTED, "state_digest": 5 + rank} for rank in range(4)}, state=_OWNED),
    )

    last_state = True

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._agreed: dict[int, int] = {}  # optimizer -> newest step that left equal state
        self._changed: dict[int, tuple[int, ...]] = {}
        self._own: set[int] = set()  # optimizers whose ranks have come to equal parameters from different state

    @property
    def awake(self) -> bool:
        return any(self._changed.values())

    def rank_classes(self, step: Step) -> RankClasses | None:
        classes = classes_of(step, "state_digest", on_purpose=_ON_PURPOSE)
        return None if classes and (step.optimizer in self._own or made_alike(step)) else classes

    def is_new_event(self, step: Step) -> bool:
        changed = step.ranks_with(Flag.STATE_CHANGED_OUTSIDE)
        agreed = self._agreed.get(step.optimizer) == step.step - 1
        return subset(changed, step) and agreed and changed != self._changed.get(step.optimizer)

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        alone = "changed_on" in finding.evidence
        if cause.code == "RANK101":
            return cause.phase != "optimizer" and (not alone or cause.ranks == finding.ranks)
        return not alone or cause.code in {"RANK105", "RANK112"}

    def remember(self, step: Step, classes: RankClasses | None) -> None:
        if classes_of(step, "state_digest") == {}:
            self._agreed[step.optimizer] = step.step
        elif any(step.columns["lr"]) and made_alike(step) and classes_of(step, "state_digest", on_purpose=_ON_PURPOSE):
            self._own.add(step.optimizer)
        self._changed[step.optimizer] = step.ranks_with(Flag.STATE_CHANGED_OUTSIDE)

    def report(self, step: Step, classes: RankClasses) -> Findings:
        told = {rank: answer.states for rank, answer in step.answers(OptimizerState).items()}
        flat = {rank: _flat(states) for rank, states in told.items()}
        differing = differing_names(flat)
        if are_own(step, [name.rpartition(":")[0] for name in differing], self.shared):
            return
        names = [name for name in differing if is_part(name) or all(name in own for own in flat.values())]
        if differing and not names and len(flat) == len(step.rows):
            return  # each of them has its owner
        tolerance = self.config.get("tolerance")
        norms = {rank: states[""] for rank, states in told.items() if "" in states}
        if tolerance and (not names or agree_within(float(tolerance), norms, names)):
            return
        changed = step.ranks_with(Flag.STATE_CHANGED_OUTSIDE)
        evidence: dict[str, Any] = {"states": len(names), "keys": sorted({name.rpartition(":")[2] for name in names})}
        if names:
            evidence["digests"] = values_of(flat, names[0])
        if subset(changed, step):
            evidence["changed_on"] = list(changed)
        shared = parted_over(step, "state")
        evidence |= shared
        yield self.finding(
            step,
            ranks=named(blame(changed, step, classes), shared),
            subject=tuple(names[:MAX_NAMES]),
            evidence=evidence,
        )


def _flat(states: Mapping[str, Mapping[str, str | float]]) -> dict[str, str | float]:
    return {f"{name}:{key}": value for name, own in states.items() if name for key, value in own.items()}
