"""RANK101: the ranks do not have the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ddpdebug.detectors import causality
from ddpdebug.detectors.comparison import (
    CLASS_COLUMNS,
    MAX_NAMES,
    agree_within,
    are_own,
    are_shared,
    blame,
    classes_of,
    named,
    ordered,
    parted_over,
    subset,
    values_of,
)
from ddpdebug.detectors.examples import step_at, tables as ranks
from ddpdebug.detectors.kinds import (
    ComparisonRule,
    Examples,
    Facts,
    Fields,
    Finding,
    Findings,
    RankClasses,
    Severity,
    Step,
)
from ddpdebug.schema.announcements import InitialValues
from ddpdebug.schema.details import Parameters, differing_names, whole_name
from ddpdebug.schema.row import Flag

_OWN: dict[str, Any] = {
    "before": {"w": "a1", "b": "b1"},
    "after": {"w": "a2", "b": "b2"},
    "previous": {"w": "a1", "b": "b1"},
}
_USUAL: dict[str, Any] = {**_OWN, "order": ["w", "b"], "loads": []}
_EDITED: dict[str, Any] = {**_USUAL, "before": {"w": "ff", "b": "b1"}, "after": {"w": "fe", "b": "b2"}}
_SHRUNK: dict[str, Any] = {**_USUAL, "after": {"w": "fe", "b": "b2"}}
_CHANGED: dict[str, Any] = {"flags": Flag.PARAMS_CHANGED_OUTSIDE, "params_before_digest": 5, "params_after_digest": 6}
_SHARDED: dict[str, Any] = {
    **dict.fromkeys(("params_before_digest", "params_after_digest"), 0),
    "flags": Flag.SHARDED | Flag.NO_DDP,
    "class_0_key": 11,
    "class_0_params": 7,
}
#: Where parameters can differ, first things first -> the digest in the row, the digests by name.
_STAGES: Mapping[str, tuple[str, Callable[[Parameters], Mapping[str, str]]]] = {
    "before": ("params_before_digest", lambda told: told.before),
    "after": ("params_after_digest", lambda told: told.after),
    "foreign": ("foreign_params_digest", lambda told: told.foreign),
    "frozen": ("frozen_params_digest", lambda told: told.frozen),
}


_DREW = {0: {"digests": {"w": "a1", "b": "b1"}}, 1: {"digests": {"w": "ff", "b": "b1"}}}
_KEPT_CAUSES = (
    "`DistributedDataParallel(..., init_sync=False)` with another seed on each rank: nothing was broadcast",
    "parameters were written back after `DistributedDataParallel(...)` had broadcast rank 0's",
)
_KEPT_ACTIONS = (
    "leave `init_sync` at its default, or give the model the same seed, or the same checkpoint, on all ranks",
)


_SHARED_CAUSES = (
    "weights are drawn from another seed on each rank: `fully_shard` and `parallelize_module` broadcast nothing",
    "ranks that hold the same part have loaded it from files that differ",
)
_SHARED_ACTIONS = (
    "draw the weights from one seed, or load one checkpoint, on all ranks before they are sharded",
    "broadcast `p.to_local()` over the named dimension, in the group that `mesh.get_group` returns for it",
)


class ParametersDiffer(ComparisonRule):
    """The ranks hold different values of the same parameters, compared bit by bit by name.

    Impact: from this step on the ranks train different models. Averaged gradients no longer fit any of them, and a
    checkpoint of rank 0 is not what the other ranks computed. Nothing in DDP repairs or reports it.

    Diagnosis: the phase says when they parted. `init`: before the first step. `load`: a `load_state_dict` ran since
    the last step. `outside-optimizer`: between two steps, while the optimizer had left them equal. `optimizer`: in
    the optimizer step, from equal parameters, gradients, settings and state. No phase: what the last step has left was
    compared when the run ended, and the ranks parted in a step that was not checked, from `equal_before_step` on;
    `--every-step` names it. Print
    `param.double().sum().item()` of the first named parameter on every rank before and after that place, and look
    for code there that runs under `if rank == 0`.

    Causes:
    - `outside-optimizer`: an in-place edit (`p.data.mul_`, normalisation, an EMA swap that is not swapped back,
      `init_weights` after wrapping) that runs on some ranks only
    - `load`: a checkpoint was loaded on one rank, or the ranks found different files
    - `init`: parameters were drawn or changed after `DistributedDataParallel(...)` had broadcast rank 0's
    - `optimizer`: an optimizer whose update depends on the rank (own random numbers, own step count, extra decay)
    - `flipped bits`: memory, a bus or a device has flipped a bit: one element differs, by single bits

    Remedy:
    - `outside-optimizer`: make the edit on all ranks, or make it on one and `torch.distributed.broadcast` the result
    - `load`: load checkpoints on every rank, before wrapping, with `map_location`
    - `init`: move every initialisation in front of `DistributedDataParallel(...)`
    - `optimizer`: keep what the update depends on alike on all ranks: draws, step counts, settings
    - to go on with a run, broadcast rank 0's parameters and optimizer state, or restart from the last good checkpoint
    - `flipped bits`: run again from the last good checkpoint; if a bit flips on the same device again, test or replace
      it
    """

    code = "RANK101"
    severity = Severity.CRITICAL
    title = "parameters differ between ranks"
    incident = ("subject", "phase", "ranks")
    reads = (
        "params_before_digest",
        "params_after_digest",
        "foreign_params_digest",
        "frozen_params_digest",
        *CLASS_COLUMNS["params"],
        Flag.PARAMS_CHANGED_OUTSIDE,
    )
    of_several = True
    wants = ("parameters",)
    topics = ("init",)
    last_state = True
    fires_on = Examples(
        lambda: step_at(12, odd={2: _CHANGED}, parameters=ranks(4, _USUAL, {2: _EDITED})),
        lambda: step_at(3, odd={1: {"params_after_digest": 6}}, parameters=ranks(4, _USUAL, {1: _SHRUNK})),
        lambda: step_at(0, world=2, odd={1: {"params_before_digest": 5, "params_after_digest": 6}}),
        lambda: step_at(30, flags=Flag.LAST_STATE, params_before_digest=0, odd={1: {"params_after_digest": 6}}),
        lambda: step_at(4, **_SHARDED, odd={1: {"class_0_key": 12, "class_0_params": 8}, 2: {"class_0_params": 9}}),
        lambda: (
            Facts(topic="init:0", values=_DREW),
            step_at(0, world=2, flags=Flag.FIRST, odd={1: _CHANGED}, parameters=ranks(2, _USUAL, {1: _EDITED})),
        ),
    )
    silent_on = Examples(
        lambda: (step_at(0), step_at(1), step_at(2)),
        lambda: step_at(4, flags=Flag.LOCAL_ONLY, odd={1: {"params_after_digest": 6}}),
        lambda: step_at(4, flags=Flag.SHARDED_STATE, odd={1: {"params_after_digest": 6}}),
        lambda: step_at(4, odd={1: {"params_after_digest": 0}}),
        lambda: step_at(30, flags=Flag.LAST_STATE, odd={1: {"params_after_digest": 0}}),  # rewritten on purpose
        lambda: step_at(4, world=1),
        # ranks of other classes hold other parts
        lambda: step_at(4, **_SHARDED, odd={rank: {"class_0_key": 12, "class_0_params": 8} for rank in (1, 3)}),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._agreed: dict[int, int] = {}  # optimizer -> newest step that left equal parameters
        self._seen_to_part: dict[tuple[int, int], str] = {}  # (optimizer, step after which they agreed) -> phase
        self._found_equal: dict[int, int] = {}  # optimizer -> newest step that found equal ones, all of them read
        self._drawn: dict[int, dict[str, str]] = {}  # rank -> digests of what its modules held as they were wrapped
        self._changed: dict[int, tuple[int, ...]] = {}  # optimizer -> ranks that changed theirs before the last step
        self._edited: set[int] = (
            set()
        )  # optimizers whose parameters all ranks change between steps: weight clipping, ...

    def compare(self, topic: str, facts: Mapping[int, InitialValues]) -> Findings:
        for rank, fact in facts.items():
            self._drawn.setdefault(rank, {}).update(fact.digests)
        yield from ()

    def _kept(self, step: Step, names: Collection[str]) -> bool:
        """Whether all ranks hold what they held as they were wrapped, so that DDP has broadcast nothing."""
        told = step.answers(Parameters)
        tables = [(own.before, self._drawn.get(rank, {})) for rank, own in told.items()]
        pairs = [(before.get(name), drawn.get(name)) for before, drawn in tables for name in names]
        return bool(pairs) and all(now is not None and now == drawn for now, drawn in pairs)

    def rank_classes(self, step: Step) -> RankClasses | None:
        if step.any(Flag.SHARDED_STATE):  # the owner of a shard sends its part to the others after the hooks
            return classes_of(step, "params_before_digest", "frozen_params_digest")
        fields = ("params_before_digest", "params_after_digest", "foreign_params_digest", "frozen_params_digest")
        return classes_of(step, *fields)

    def is_new_event(self, step: Step) -> bool:
        changed = step.ranks_with(Flag.PARAMS_CHANGED_OUTSIDE)
        return subset(changed, step) and changed != self._changed.get(step.optimizer) and self._telling(step)

    def causal_rank(self, finding: Finding) -> int:
        inside = finding.phase in {"optimizer", None}
        return super().causal_rank(finding) if inside else causality.rank("parameters, outside the optimizer")

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        # Who changed parameters between two steps did so whatever else is wrong, unless the steps are not the same, or
        # nothing ties the ranks together, or what was written is NaN on one rank, which names it.
        return "changed_on" not in finding.evidence or cause.code in {"NUM304", "RANK105", "RANK112", "SYNC208"}

    def remember(self, step: Step, classes: RankClasses | None) -> None:
        if classes is not None:
            self._changed[step.optimizer] = step.ranks_with(Flag.PARAMS_CHANGED_OUTSIDE)
        if step.all(Flag.PARAMS_CHANGED_OUTSIDE):
            self._edited.add(step.optimizer)
        agrees = classes is not None and not classes  # None: nobody can tell
        if agrees and (step.known("params_after_digest") or are_shared(step, "params")):
            self._agreed[step.optimizer] = step.step
        if step.agrees("params_before_digest"):
            self._found_equal[step.optimizer] = step.step

    def _telling(self, step: Step) -> bool:
        """Whether a change outside the optimizer on some ranks only is news, not what the code always does."""
        return step.optimizer not in self._edited or self._agreed.get(step.optimizer) == step.step - 1

    def report(self, step: Step, classes: RankClasses) -> Findings:
        told = step.answers(Parameters)
        stage, names = _differing(step)
        if are_own(step, names, self.shared):
            return
        phase = self._phase(step, stage)
        changed, own_names = _changed_outside(step, names) if phase != "optimizer" else ((), [])
        names = own_names or names
        if not self._intolerable(step, names):
            return
        loads = [load for own in told.values() for load in own.loads]
        by_rank = _digests(step, stage)
        evidence: dict[str, Any] = {"parameters": len({*map(whole_name, names)})}
        if names:
            evidence["digests"] = values_of(by_rank, names[0])
        if step.any(Flag.LAST_STATE):
            if step.optimizer in self._found_equal:
                evidence["equal_before_step"] = self._found_equal[step.optimizer]
        elif step.optimizer in self._agreed:
            evidence["agreed_after_step"] = self._agreed[step.optimizer]
            if phase is None:
                evidence["observed"] = (
                    "they parted in a step that was not checked; --every-step says in which, and by what"
                )
        if subset(changed, step) and self._telling(step):
            evidence["changed_on"] = list(changed)
        shared = parted_over(step, "params")
        evidence |= shared
        prose: Fields = {"causes": _SHARED_CAUSES, "actions": _SHARED_ACTIONS} if shared and phase == "init" else {}
        if phase == "init" and self._kept(step, names):
            evidence["observed"] = "each rank holds what it held before it was wrapped: DDP has broadcast nothing"
            prose = {"causes": _KEPT_CAUSES, "actions": _KEPT_ACTIONS}
        yield self.finding(
            step,
            **prose,
            ranks=named(blame(changed, step, classes), shared),
            subject=tuple(names[:MAX_NAMES]),
            phase=phase,
            location=loads[0].location if loads and phase == "load" else None,
            evidence=evidence,
        )

    def _phase(self, step: Step, stage: str) -> str | None:
        """Return where they part now, or where they were seen to, if they have not agreed since."""
        phase, since = self._phase_now(step, stage), (step.optimizer, self._agreed.get(step.optimizer, step.step))
        if phase is not None:
            self._seen_to_part = {since: phase}
        return phase or (None if step.any(Flag.LAST_STATE) else self._seen_to_part.get(since))

    def _phase_now(self, step: Step, stage: str) -> str | None:
        if step.any(Flag.LAST_STATE):
            return None  # they parted in some step that was not checked
        if stage == "after" and self._left_alone(step):
            return "optimizer"
        loads = any(told.loads for told in step.answers(Parameters).values())
        if step.any(Flag.LOADED) or loads:
            return "load"
        if step.any(Flag.FIRST):
            return "init"
        watched = self._agreed.get(step.optimizer) == step.step - 1 or step.any(Flag.PARAMS_CHANGED_OUTSIDE)
        upstream = {"grads_digest", "foreign_grads_digest", "hyper_digest", "state_digest"}
        if not watched and upstream & step.differing:
            return "optimizer"  # nobody looked at the steps before: what differs upstream now is the likelier beginning
        unseen = not watched and self._agreed.get(step.optimizer, step.step) < step.step - 1
        return None if unseen else "outside-optimizer"  # what differed upstream in one of these may be equal again

    def _left_alone(self, step: Step) -> bool:
        """Whether the optimizer has found equal parameters, as far as is known."""
        if not step.any(Flag.SHARDED):
            return "params_before_digest" not in step.differing and step.known("params_before_digest")
        told = {rank: own.before for rank, own in step.answers(Parameters).items() if own.before}
        if len(told) > 1 and step.any(Flag.FIRST):
            return not differing_names(told)
        return self._agreed.get(step.optimizer) == step.step - 1 and not step.any(Flag.PARAMS_CHANGED_OUTSIDE)

    def _intolerable(self, step: Step, names: Collection[str]) -> bool:
        tolerance = self.config.get("tolerance")
        if not tolerance:
            return True
        norms = {rank: told.norms for rank, told in step.answers(Parameters).items()}
        return bool(names) and not agree_within(float(tolerance), norms, names)


def _differing(step: Step) -> tuple[str, list[str]]:
    """Return where parameters differ first, and which."""
    stage = next((stage for stage, (name, _) in _STAGES.items() if name in step.differing), "after")
    order = next((told.order for told in step.answers(Parameters).values()), ())
    return stage, ordered(differing_names(_digests(step, stage)), order)


def _digests(step: Step, stage: str) -> dict[int, Mapping[str, str]]:
    return {rank: _STAGES[stage][1](told) for rank, told in step.answers(Parameters).items()}


def _changed_outside(step: Step, names: Collection[str]) -> tuple[tuple[int, ...], list[str]]:
    """Return the ranks that found other parameters than they had left, and which of the differing ones these are."""
    changed: dict[int, list[str]] = {}
    for rank, told in step.answers(Parameters).items():
        own = [name for name in names if name in told.previous and told.previous[name] != told.before.get(name)]
        if own:
            changed[rank] = own
    if not changed:
        return step.ranks_with(Flag.PARAMS_CHANGED_OUTSIDE), []
    touched = {name for own in changed.values() for name in own}
    return tuple(sorted(changed)), [name for name in names if name in touched]
