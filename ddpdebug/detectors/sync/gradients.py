"""Why gradients differ between ranks: one symptom, one verdict, one code. Not a rule itself. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ddpdebug.detectors.base import Detector, Labels
from ddpdebug.detectors.comparison import MAX_NAMES, agree_within, culprits, labels, ordered, subset, tables
from ddpdebug.schema.details import differing_names
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

#: The norm of a gradient is taken twice by the same kernel: equal elements give equal norms.
_UNCHANGED = 1e-6
_ON_PURPOSE = Flag.LOCAL_ONLY | Flag.SHARDED_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The one code that explains why gradients differ, and what shows it."""

    code: str
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    location: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


class GradientRule(Detector):
    """Base of the rules that start from gradients which differ at the optimizer step."""

    severity: ClassVar[Severity] = Severity.CRITICAL
    wants: ClassVar[tuple[str, ...]] = ("gradients", "contract")
    group = "gradients"
    follows: ClassVar[tuple[str, ...]] = ("RANK105", "RANK112")
    stage = 30

    def symptom(self, step: Step) -> Labels | None:
        return symptom(step)

    def detect(self, step: Step) -> Iterator[Finding]:
        verdict = judge(step, self.config.get("tolerance"))
        if verdict is not None and verdict.code == self.code:
            yield self.report(step, verdict)

    def report(self, step: Step, verdict: Verdict) -> Finding:
        """Put a verdict into words."""
        return self.finding(
            step=step.step,
            ranks=verdict.ranks,
            subject=verdict.names[:MAX_NAMES],
            phase=verdict.phase,
            location=verdict.location,
            evidence={"parameters": len(verdict.names), **verdict.evidence},
        )


def symptom(step: Step) -> Labels | None:
    """Return what the ranks' gradients at the step look like."""
    return labels(step, "grads_digest", "foreign_grads_digest", on_purpose=_ON_PURPOSE)


def judge(step: Step, tolerance: float | None = None) -> Verdict | None:
    """Return why gradients differ in this step; None when they do not, or differ by design."""
    shown = symptom(step)
    if not shown or _different_models(step):
        return None
    names = differing(step)
    if tolerance and agree_within(float(tolerance), _norms(step), names):
        return None
    for explain in (_no_ddp, _unreduced, _groups, _bypass, _no_sync, _changed_after):
        verdict = explain(step, shown, names)
        if verdict is not None:
            return verdict
    hooks = sorted({str(table["hook"]) for table in tables(step, "contract").values() if table.get("hook")})
    evidence: dict[str, Any] = {"hook": hooks[0]} if hooks else {}
    without = missing(step)
    if without and not find_unused(step):
        evidence["without_gradient"] = without
        evidence["find_unused_parameters"] = False
    return Verdict(code="SYNC201", names=tuple(names), ranks=culprits(shown), evidence=evidence)


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
    """Tell whether DDP looks for unused parameters."""
    return any(table.get("find_unused") for table in tables(step, "contract").values())


def groups(step: Step) -> list[list[int]]:
    """Return the process groups that reduce gradients, sorted and without repetition."""
    found = {tuple(group) for table in tables(step, "contract").values() for group in table.get("groups", ())}
    return [list(group) for group in sorted(found)]


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
    """Tell whether no DDP is involved and the ranks do not even have the same parameters: a pipeline, for example."""
    foreign = tables(step, "gradients", "foreign")
    return step.all(Flag.NO_DDP) and len({frozenset(table) for table in foreign.values()}) > 1


def _no_ddp(step: Step, shown: Labels, names: list[str]) -> Verdict | None:
    contracts = tables(step, "contract")
    wrappers = [table.get("ddp") for table in contracts.values()]
    if any(wrappers) or not (contracts or step.all(Flag.NO_DDP)):
        return None
    return Verdict(code="SYNC208", names=tuple(names), ranks=culprits(shown), evidence={"ddp_wrappers": 0})


def _unreduced(step: Step, shown: Labels, names: list[str]) -> Verdict | None:
    reasons: dict[str, str] = {}
    for table in tables(step, "contract").values():
        reasons.update({name: why for name, why in table.get("unreduced", {}).items() if name in set(names)})
    if not reasons:
        return None
    found = [name for name in names if name in reasons]
    which = sorted(set(reasons.values()))
    return Verdict(
        code="SYNC203",
        names=tuple(found),
        ranks=culprits(shown),
        phase=which[0] if len(which) == 1 else None,
        evidence={
            "which": {name: reasons[name] for name in found[:MAX_NAMES]},
            "also_differing": len(names) - len(found),
        },
    )


def _groups(step: Step, shown: Labels, names: list[str]) -> Verdict | None:
    smaller = [group for group in groups(step) if 1 <= len(group) < step.world]
    for group in smaller:
        if len({shown[rank] for rank in group if rank in shown}) > 1:
            return None  # not even the ranks of one group agree
    if not smaller:
        return None
    return Verdict(code="SYNC211", names=tuple(names), ranks=culprits(shown), evidence={"groups": smaller})


def _misuse(step: Step, key: str) -> dict[int, Mapping[str, Any]]:
    return dict(tables(step, "contract", key))


def _bypass(step: Step, shown: Labels, names: list[str]) -> Verdict | None:
    found = _misuse(step, "bypass")
    flagged = sorted(found) or list(step.ranks_with(Flag.BYPASS))
    if not flagged:
        return None
    location = next((entry.get("location") for entry in found.values() if entry.get("location")), None)
    ranks = tuple(flagged) if subset(flagged, step) else culprits(shown)
    return Verdict(code="SYNC202", names=tuple(names), ranks=ranks, location=location)


def _no_sync(step: Step, shown: Labels, names: list[str]) -> Verdict | None:
    found = _misuse(step, "no_sync")
    flagged = sorted(found) or list(step.ranks_with(Flag.UNSYNCED_BACKWARD))
    if not flagged:
        return None
    first = next(iter(found.values()), {})
    ranks = tuple(flagged) if subset(flagged, step) else culprits(shown)
    return Verdict(
        code="SYNC205",
        names=tuple(names),
        ranks=ranks,
        phase=first.get("kind"),
        location=first.get("location"),
        evidence={"which": first.get("kind")},
    )


def _changed_after(step: Step, shown: Labels, names: list[str]) -> Verdict | None:
    """Gradients that were equal right after their reduction and are not at the step."""
    sums = tables(step, "gradients", "reduced_sums")
    compared = [name for name in names if all(name in table for table in sums.values())]
    equal = len(sums) == len(step.rows) and compared == names and bool(names)
    equal = equal and all(len({repr(table[name]) for table in sums.values()}) == 1 for name in compared)
    factors = clip_factors(step)
    unequal_clipping = len({round(f, 6) for f in factors.values()}) > 1
    by_row = not step.details.get("gradients") and _rows_agree_after_reduction(step)
    if not equal and not (by_row and unequal_clipping):
        return None
    evidence: dict[str, Any] = {"gradients_after_reduction": "equal on all ranks"}
    ratios = {str(r): f for r, f in factors.items()} if unequal_clipping else _ratios(step, names)
    if ratios:
        evidence["ratio"] = ratios
    if unequal_clipping:
        evidence["clip_norm"] = {str(rank): row.clip_norm for rank, row in step.rows.items()}
        evidence["clip_max"] = {str(rank): row.clip_max for rank, row in step.rows.items()}
    return Verdict(
        code="SYNC206",
        names=tuple(names),
        ranks=culprits(shown) if unequal_clipping else _who_changed(shown, ratios),
        phase="clipping" if unequal_clipping else None,
        location=clip_location(step) if unequal_clipping else None,
        evidence=evidence,
    )


def _who_changed(shown: Labels, ratios: Mapping[str, float]) -> tuple[int, ...]:
    """Return the outvoted ranks; where there is no majority, those whose gradients grew or shrank, if only some did."""
    voted = culprits(shown)
    changed = tuple(rank for rank in voted if abs(ratios.get(str(rank), 1.0) - 1.0) > _UNCHANGED)
    return changed if len(voted) == len(shown) and 0 < len(changed) < len(voted) else voted


def _rows_agree_after_reduction(step: Step) -> bool:
    sums = {repr(row.reduced_sums) for row in step.rows.values()}
    return len(sums) == 1 and "nan" not in next(iter(sums))


def _ratios(step: Step, names: list[str]) -> dict[str, float]:
    """Return rank -> norm of the gradient at the step / right after the reduction, where both were measured."""
    after, now = tables(step, "gradients", "reduced_norms"), tables(step, "gradients", "step_norms")
    found = {}
    for rank in sorted(after.keys() & now.keys()):
        whole = math.hypot(*(float(after[rank].get(name, 0.0)) for name in names))
        if whole > 0 and math.isfinite(whole):
            found[str(rank)] = math.hypot(*(float(now[rank].get(name, 0.0)) for name in names)) / whole
    return found
