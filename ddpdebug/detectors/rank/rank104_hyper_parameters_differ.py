"""RANK104: the optimizers of the ranks have different settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES, classes_of, culprits
from ddpdebug.detectors.examples import step_at, tables as ranks
from ddpdebug.detectors.kinds import ComparisonRule, Examples, Finding, Findings, RankClasses, Severity, Step
from ddpdebug.schema.details import HyperParameters
from ddpdebug.schema.row import Flag

_USUAL = [{"lr": 0.1, "betas": [0.9, 0.999]}]


class HyperParametersDiffer(ComparisonRule):
    """The settings of the same optimizer (lr, weight decay, betas, momentum, ...) differ between ranks.

    Impact: equal gradients become unequal updates, so the ranks' parameters part from this step on, and no later
    averaging of gradients brings them together again.

    Diagnosis: the evidence names the parameter group, the key and each rank's value. Print `optimizer.param_groups`
    and `scheduler.last_epoch` on every rank after each `scheduler.step(...)`, and find the first place where a number
    that only this rank knows goes into a schedule.

    Causes:
    - `params`: groups that are put together from a set, or by what differs on a rank: the same settings, other
      parameters
    - `from the start`: the settings are computed from the rank, from a node's configuration file or from an environment
      variable of one rank
    - a scheduler that counts this rank's batches, tokens or samples, or is stepped on rank 0 only
    - a scheduler driven by a local number: `ReduceLROnPlateau.step(val_loss)` with each rank's own validation loss
    - the scheduler or optimizer state was restored on some ranks only

    Remedy:
    - `params`: build groups from `model.named_parameters()`, in that order, by names alone
    - `from the start`: read the configuration on rank 0 and broadcast it with `dist.broadcast_object_list`
    - step schedulers on every rank, from the global step
    - all-reduce the number that drives the schedule (`dist.all_reduce(val_loss)`; divide by the world size) first
    - restart from a checkpoint that is older than the named step: the parameters have parted since
    """

    code = "RANK104"
    severity = Severity.CRITICAL
    title = "optimizer settings differ between ranks"
    reads = ("hyper_digest",)
    of_several = True
    wants = ("hyper",)
    fires_on = Examples(
        lambda: step_at(
            7, odd={1: {"hyper_digest": 9, "lr": 0.03}}, hyper=ranks(4, _USUAL, {1: [{**_USUAL[0], "lr": 0.03}]})
        ),
        lambda: step_at(7, world=2, odd={1: {"hyper_digest": 9, "lr": 0.03}}),
        lambda: step_at(7, world=3, odd={1: {"hyper_digest": 9}}, hyper=ranks(3, _USUAL, {1: [*_USUAL, {"lr": 1.0}]})),
    )
    silent_on = Examples(
        lambda: (step_at(0, hyper=ranks(4, _USUAL)), step_at(1)),
        lambda: step_at(3, hyper_digest=77, lr=0.01),
        lambda: step_at(3, odd={1: {"hyper_digest": 0}}),
    )

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        # groups with settings of their own are a population; a reduction over too few ranks explains no settings
        return cause.code != "SYNC211" or cause.severity is Severity.WARNING

    def rank_classes(self, step: Step) -> RankClasses | None:
        return classes_of(step, "hyper_digest", on_purpose=Flag(0))

    def report(self, step: Step, classes: RankClasses) -> Findings:
        groups = {rank: told.groups for rank, told in step.answers(HyperParameters).items()}
        entries = _differences(groups) if len(groups) > 1 else _from_rows(step)
        evidence: dict[str, Any] = {"optimizer": step.optimizer}
        if entries:
            group, key, values = entries[0]
            evidence |= {"group": group, "key": key, "values": values}
        yield self.finding(
            step,
            ranks=culprits(classes),
            subject=tuple(_name(group, key) for group, key, _ in entries[:MAX_NAMES]),
            evidence=evidence,
        )


def _name(group: int | None, key: str | None) -> str:
    return "param_groups" if group is None else f"param_groups[{group}].{key}"


def _differences(groups: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[tuple[int | None, str | None, Any]]:
    """Return (group, key, value of each rank) for all that differs; (None, None, counts) if the groups do."""
    lengths = {str(rank): len(own) for rank, own in groups.items()}
    if len(set(lengths.values())) > 1:
        return [(None, None, lengths)]
    found: list[tuple[int | None, str | None, Any]] = []
    for i in range(next(iter(lengths.values()))):
        for key in sorted({key for own in groups.values() for key in own[i]}, key=lambda k: (k != "lr", k)):
            values = {str(rank): own[i].get(key) for rank, own in groups.items()}
            if len({repr(value) for value in values.values()}) > 1:
                found.append((i, key, values))
    return found


def _from_rows(step: Step) -> list[tuple[int | None, str | None, Any]]:
    rates = {str(rank): row.lr for rank, row in step.rows.items()}
    return [(0, "lr", rates)] if len({repr(rate) for rate in rates.values()}) > 1 else []
