"""What the rules share that explain why gradients differ between ranks. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

from ddpdebug.detectors.comparison import (
    CLASS_COLUMNS,
    MAX_NAMES,
    agree_within,
    are_own,
    classes_of,
    culprits,
    made_alike,
    named,
    ordered,
    own_names,
    parted_over,
    subset,
)
from ddpdebug.detectors.kinds import ChainRule, Finding, Findings, RankClasses, Severity, Step, Verdict
from ddpdebug.schema.details import Contract, Gradients, differing_names, whole_name
from ddpdebug.schema.row import Flag

_ON_PURPOSE = Flag.LOCAL_ONLY | Flag.SHARDED_STATE
#: The columns that show it.
GRADIENT_COLUMNS = ("grads_digest", "foreign_grads_digest", *CLASS_COLUMNS["grads"])

T = TypeVar("T")


class GradientRule(ChainRule):
    """Base of the rules that start from gradients which differ at the optimizer step.

    The chain is SYNC208, 203, 211, 202, 205, 206 and, where none of them explains it, SYNC201.
    """

    severity: ClassVar[Severity] = Severity.CRITICAL
    reads: ClassVar[tuple[str | Flag, ...] | None] = GRADIENT_COLUMNS
    of_several = True
    wants: ClassVar[tuple[str, ...]] = ("gradients", "contract", "parameters")
    group = "gradients"

    def rank_classes(self, step: Step) -> RankClasses | None:
        return gradient_classes(step)

    def report(self, step: Step, classes: RankClasses) -> Findings:
        tolerance = self.config.get("tolerance")
        close = tolerance and agree_within(float(tolerance), _norms(step), differing(step))
        if not (close or are_own(step, differing(step), self.shared)):
            yield from super().report(step, classes)

    def word(self, step: Step, verdict: Verdict) -> Finding:
        shared, own = parted_over(step, "grads"), own_names(step, self.shared) or set()
        subject = tuple([name for name in verdict.subject if name not in own]) or verdict.subject
        return self.finding(
            step,
            ranks=named(verdict.ranks, shared),
            subject=subject[:MAX_NAMES],
            phase=verdict.phase,
            location=verdict.location,
            evidence={"parameters": len({*map(whole_name, subject)}), **verdict.evidence, **shared},
        )


def of_population(finding: Finding, step: Step, groups: Sequence[Sequence[int]]) -> Finding:
    """Return a finding about groups that train apart as a warning where each has settings of its own: on purpose."""
    shown = [{step.rows[rank].hyper_digest for rank in group if rank in step.rows} for group in groups]
    own = "hyper_digest" in step.differing and all(len(settings) == 1 for settings in shown)
    return replace(finding, severity=Severity.WARNING) if own and shown else finding


def gradient_classes(step: Step) -> RankClasses | None:
    """What the ranks' gradients look like at the step.

    Without those that no DDP averages where the step has left equal parameters: its optimizer averages them itself.
    """
    fields = GRADIENT_COLUMNS[: 1 if made_alike(step) else 2]
    return classes_of(step, *fields, on_purpose=_ON_PURPOSE)


def odd_ranks(step: Step) -> tuple[int, ...]:
    """The ranks whose gradients are outvoted; all without a majority."""
    return culprits(gradient_classes(step) or {})


def differing(step: Step) -> list[str]:
    """Return the names of the parameters whose gradients differ, in the order of the model."""
    own, foreign = {rank: told.digests for rank, told in step.answers(Gradients).items()}, _foreign(step)
    names = [*differing_names(own), *differing_names(foreign)]
    first = next(iter([*own.values(), *foreign.values()]), {})
    return ordered(set(names), list(first))


def missing(step: Step) -> dict[str, list[str]]:
    """Return rank (as text) -> trainable parameters without a gradient, for ranks that have some."""
    told = step.answers(Gradients)
    return {str(rank): list(own.missing[:MAX_NAMES]) for rank, own in told.items() if own.missing}


def find_unused(step: Step) -> bool:
    """Whether DDP looks for unused parameters."""
    return any(told.find_unused for told in step.answers(Contract).values())


def hooks(step: Step) -> list[str]:
    """Return the communication hooks of the ranks, each once."""
    return sorted({told.hook for told in step.answers(Contract).values() if told.hook})


def clip_factors(step: Step) -> dict[int, float]:
    """Return rank -> the factor by which clipping scaled its gradients; empty unless every rank tells."""
    factors = {}
    for rank, row in step.rows.items():
        if not (row.has(Flag.CLIPPED) and math.isfinite(row.clip_norm) and math.isfinite(row.clip_max)):
            return {}
        factors[rank] = min(1.0, row.clip_max / row.clip_norm) if row.clip_norm > 0 else 1.0
    return factors


def clip_location(step: Step) -> str | None:
    """Return where gradients were clipped."""
    clips = [clip for told in step.answers(Contract).values() for clip in told.clips]
    return next((clip.location for clip in clips if clip.location), None)


def _norms(step: Step) -> dict[int, Mapping[str, float]]:
    return {rank: told.step_norms for rank, told in step.answers(Gradients).items()}


def _foreign(step: Step) -> dict[int, Mapping[str, str]]:
    return {rank: told.foreign for rank, told in step.answers(Gradients).items()}


def misuse(step: Step, read: Callable[[Contract], T | None], flag: Flag) -> tuple[tuple[int, ...], Mapping[int, T]]:
    """Return the ranks that misuse DDP in one way, and rank -> its detail about that.

    Args:
        read: returns the detail's part about this misuse, None where there was none.
        flag: of the rows that show it, for ranks without a detail.
    """
    found = {rank: entry for rank, told in step.answers(Contract).items() if (entry := read(told)) is not None}
    flagged = sorted(found) or list(step.ranks_with(flag))
    ranks = tuple(flagged) if subset(flagged, step) else odd_ranks(step) if flagged else ()
    return ranks, found
