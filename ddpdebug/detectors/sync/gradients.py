"""What the rules share that explain why gradients differ between ranks. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.base import RankClasses
from ddpdebug.detectors.comparison import MAX_NAMES, agree_within, classes_of, culprits, ordered, subset, tables
from ddpdebug.detectors.kinds import ChainRule, Verdict
from ddpdebug.schema.details import differing_names
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

_ON_PURPOSE = Flag.LOCAL_ONLY | Flag.SHARDED_STATE


class GradientRule(ChainRule):
    """Base of the rules that start from gradients which differ at the optimizer step.

    The chain is SYNC208, 203, 211, 202, 205, 206 and, where none of them explains it, SYNC201.
    """

    severity: ClassVar[Severity] = Severity.CRITICAL
    wants: ClassVar[tuple[str, ...]] = ("gradients", "contract")
    group = "gradients"

    def rank_classes(self, step: Step) -> RankClasses | None:
        return gradient_classes(step)

    def report(self, step: Step, classes: RankClasses) -> Iterator[Finding]:
        tolerance = self.config.get("tolerance")
        close = tolerance and agree_within(float(tolerance), _norms(step), differing(step))
        if not close and not _different_models(step):
            yield from super().report(step, classes)

    def word(self, step: Step, verdict: Verdict) -> Finding:
        return self.finding(
            step,
            ranks=verdict.ranks,
            subject=verdict.subject[:MAX_NAMES],
            phase=verdict.phase,
            location=verdict.location,
            evidence={"parameters": len(verdict.subject), **verdict.evidence},
        )


def gradient_classes(step: Step) -> RankClasses | None:
    """What the ranks' gradients look like at the step."""
    return classes_of(step, "grads_digest", "foreign_grads_digest", on_purpose=_ON_PURPOSE)


def odd_ranks(step: Step) -> tuple[int, ...]:
    """The ranks whose gradients are outvoted; all where there is no majority."""
    return culprits(gradient_classes(step) or {})


def differing(step: Step) -> list[str]:
    """Return the names of the parameters whose gradients differ, in the order of the model."""
    own, foreign = tables(step, "gradients", "digests"), tables(step, "gradients", "foreign")
    names = [*differing_names(own), *differing_names(foreign)]
    first = next(iter([*own.values(), *foreign.values()]), {})
    return ordered(set(names), list(first))


def missing(step: Step) -> dict[str, list[str]]:
    """Return rank (as text) -> trainable parameters without a gradient, for ranks that have some."""
    found = {}
    for rank, answer in sorted(step.details.get("gradients", {}).items()):
        if names := answer.get("missing"):
            found[str(rank)] = list(names)[:MAX_NAMES]
    return found


def find_unused(step: Step) -> bool:
    """Whether DDP looks for unused parameters."""
    return any(table.get("find_unused") for table in tables(step, "contract").values())


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
    clips = [clip for table in tables(step, "contract").values() for clip in table.get("clips", ())]
    return next((clip["location"] for clip in clips if clip.get("location")), None)


def _norms(step: Step) -> dict[int, Mapping[str, Any]]:
    return tables(step, "gradients", "step_norms") or tables(step, "gradients", "reduced_norms")


def _different_models(step: Step) -> bool:
    """Whether no DDP is involved and the ranks do not even have the same parameters: a pipeline, for example."""
    foreign = tables(step, "gradients", "foreign")
    return step.all(Flag.NO_DDP) and len({frozenset(table) for table in foreign.values()}) > 1


def misuse(step: Step, key: str, flag: Flag) -> tuple[tuple[int, ...], Mapping[int, Mapping[str, Any]]]:
    """The ranks that have broken their contract with DDP in one way, none or some, and what they tell about it."""
    found = tables(step, "contract", key)
    flagged = sorted(found) or list(step.ranks_with(flag))
    ranks = tuple(flagged) if subset(flagged, step) else odd_ranks(step) if flagged else ()
    return ranks, found
