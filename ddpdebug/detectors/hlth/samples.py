"""What the rules about layers share: how sampled statistics are asked for, read and imitated. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.kinds import Detector, Fields, Finding, Findings, Step, Streak, StreakRule, Threshold
from ddpdebug.schema.details import LayerActivation, LayerParameter, LayerStatistics

_MAX_SUBJECTS = 20


class SampledRule(Detector):
    """A rule about the per-layer statistics of sampled steps."""

    reads: ClassVar[tuple[str, ...] | None] = ("update_norm",)
    wants = ("layers",)
    every_sample: ClassVar[bool] = True

    def can_show(self, step: Step) -> bool:
        return False  # said once: what is wrong with a layer does not come and go

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        return cause.code != "RANK107" or cause.phase not in {"constants", "loss"}  # may be meant, and never ends

    def suspects(self, step: Step) -> bool:
        return any(math.isfinite(row.update_norm) for row in step.rows.values())


class LayerRule(SampledRule, StreakRule):
    """A rule that speaks when a layer looks bad in several samples in a row."""

    layer_samples = enough = Threshold(
        3,
        "samples in a row in which a layer must look bad",
        source="a single batch may saturate or kill a layer for once",
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._found: Mapping[str, Any] = {}  # in the newest sample
        self._told: set[tuple[int, str]] = set()

    def judge(self, step: Step) -> Fields | None:
        """The names that look bad in a sample, with the evidence, None without a sample; called once per step."""
        raise NotImplementedError

    def shown(self, step: Step) -> Mapping[str, bool] | None:
        found = self.judge(step)
        if found is None:
            return None
        self._found = found
        return {**dict.fromkeys(self.running(step.optimizer), False), **dict.fromkeys(found, True)}

    def report(self, step: Step, streaks: Mapping[str, Streak]) -> Findings:
        ready = [name for name in self._found if name in streaks]
        new = [name for name in ready if (step.optimizer, name) not in self._told]
        self._told.update((step.optimizer, name) for name in new)
        for phase in dict.fromkeys(self.phase(name) for name in new):
            names = [name for name in new if self.phase(name) == phase]
            yield self.finding(
                step,
                step=min(streaks[name].first for name in names),
                subject=tuple(names[:_MAX_SUBJECTS]),
                phase=phase,
                evidence={
                    "layers": {name: self._found[name] for name in names[:_MAX_SUBJECTS]},
                    "samples": int(self.enough),
                },
            )

    def phase(self, name: str) -> str | None:
        """Return what kind of finding a bad layer makes, where a rule has several."""
        return None


def parameters(step: Step) -> Mapping[str, LayerParameter]:
    """Return the parameters of a sample, from the first layer to the last; {} where there is none."""
    for answer in step.answers(LayerStatistics).values():
        if answer.parameters:
            return {name: answer.parameters[name] for name in answer.order or ()}
    return {}


def sites(step: Step) -> Mapping[str, Sequence[LayerActivation]]:
    """Return what the ranks saw of each activation that all of those saw which tell of any."""
    tables = [answer.modules for answer in step.answers(LayerStatistics).values() if answer.modules]
    if not tables:
        return {}
    return {path: [table[path] for table in tables] for path in tables[0] if all(path in table for table in tables)}


def least_of(ranks: Sequence[LayerActivation], read: Callable[[LayerActivation], float | None]) -> float | None:
    """Return the smallest of what the ranks saw of an activation; None where one of them did not see it."""
    known = [value for about in ranks if (value := read(about)) is not None]
    return min(known) if known and len(known) == len(ranks) else None


def update_ratio(step: Step) -> float | None:
    """Return the norm of a step's update over that of the weights, where the step was sampled."""
    for row in step.rows.values():
        if math.isfinite(row.update_norm) and row.param_norm > 0:
            return row.update_norm / row.param_norm
    return None


def ratios(step: Step) -> dict[str, float]:
    """Return the ratio of update to weight of every weight matrix of a sample."""
    return {
        name: about.update / about.norm
        for name, about in parameters(step).items()
        if about.dim > 1 and about.norm and about.update is not None
    }


# --- examples ---------------------------------------------------------------------------------------------------------


def weight(**fields: Any) -> dict[str, Any]:
    """Return what is sampled of a healthy weight, with what the example says put in."""
    usual = {"norm": 4.0, "grad_norm": 0.1, "update": 0.004, "numel": 1024, "dim": 2, "lr": 0.1, "digest": "a"}
    return {**usual, **fields}


def activation(kind: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return what is sampled of a healthy activation."""
    usual = {"class": "ReLU", "role": "output", "call": 0, "kind": kind, "leaf": 2, "mean": 0.4, "std": 0.6}
    own = {"relu": {"zero": 0.5, "zero_units": 0.05, "inputs": 1024}}.get(str(kind), {"saturated": 0.02})
    return {**usual, "hidden": True, **own, **fields}


def sampled(
    count: int,
    parameters: Callable[[int], Mapping[str, Any]] | None = None,
    modules: Callable[[int], Mapping[str, Any]] | None = None,
    **fields: Any,
) -> tuple[Step, ...]:
    """Return steps of two ranks, all sampled; `parameters` and `modules` give the tables of a step."""
    found = []
    for number in range(count):
        table = dict(parameters(number)) if parameters is not None else {"w": weight(digest=f"{number}")}
        seen = dict(modules(number)) if modules is not None else {}
        details = {
            0: {"modules": seen, "parameters": table, "order": list(table)},
            1: {"modules": seen, "parameters": {}, "order": []},
        }
        rows = {0: {"param_norm": 4.0, "update_norm": 0.004}}
        found.append(step_at(number, world=2, odd=rows, layers=details, **fields))
    return tuple(found)
