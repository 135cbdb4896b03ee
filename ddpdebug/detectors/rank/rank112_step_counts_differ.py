"""RANK112: the ranks take their optimizer steps at different times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.comparison import separate_groups
from ddpdebug.detectors.examples import step_at, steps
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
    Threshold,
)
from ddpdebug.schema.announcements import End
from ddpdebug.schema.ended import parse_end
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import outvoted

#: Where nothing ties the ranks together, one may be ahead of the others.
_LOOSE = Flag.IN_JOIN | Flag.LOCAL_ONLY | Flag.NO_DDP | Flag.BYPASS | Flag.UNSYNCED_BACKWARD
_END: dict[str, Any] = {"steps": {"0": 100}, "reason": "finished"}
_SHORT: dict[str, Any] = {"steps": {"0": 99}, "reason": "finished"}


class StepCountsDiffer(ComparisonRule):
    """A rank skipped an optimizer step that the others took, or took one more, so that step n is not the same step.

    Impact: the rank's parameters and optimizer state are a step behind (or ahead) for good, although gradients are
    still averaged: the ranks differ from here on, and schedules run apart.

    Diagnosis: the evidence has the number of synchronised backward passes at the same optimizer step; the odd one is
    the rank that left a step out. Look for a condition between `backward()` and `optimizer.step()` that uses numbers
    of this rank only.

    Causes:
    - `if loss > limit: continue` or `if not torch.isfinite(loss): continue` between backward and step
    - a step skipped after an exception that only one rank had (out of memory, bad sample)
    - the accumulation window counted per rank, over batches that some ranks drop
    - different numbers of batches per rank, where the collectives happen to match

    Remedy:
    - decide together: all-reduce the flag (`dist.all_reduce(bad, op=ReduceOp.MAX)`) and skip on all ranks or on none
    - count steps, not batches, and drop incomplete windows on all ranks (`drop_last=True`)
    - use `Join` where the ranks have different numbers of batches
    """

    code = "RANK112"
    severity = Severity.ERROR
    title = "ranks are at different optimizer steps"
    incident = ("phase",)
    by_kind = True
    of_several = True
    topics = ("end",)
    missing_steps = Threshold(
        2,
        "steps in a row in which a rank has taken no step",
        source="a rank that is late by one step may still catch up",
    )
    fires_on = Examples(
        lambda: (step_at(0), step_at(1), step_at(2, odd={1: {"syncs": 4, "backwards": 4}})),
        lambda: (step_at(0), step_at(1, absent=(2,)), step_at(2, absent=(2,))),
        lambda: (step_at(0), Facts(topic="end", values={0: _END, 1: _SHORT, 2: _END, 3: _END})),
    )
    silent_on = Examples(
        lambda: steps(4),
        lambda: tuple(step_at(n, odd={0: {"syncs": 2 * n + 2}}) for n in range(4)),  # rank 0 drives one more DDP
        lambda: (step_at(0), step_at(1, absent=(2,)), step_at(2)),
        lambda: (step_at(0), step_at(2), step_at(4), step_at(1, absent=(2,)), step_at(3, absent=(2,))),
        lambda: (step_at(0, flags=Flag.IN_JOIN), *steps(3, start=1, absent=(2,), flags=Flag.IN_JOIN)),
        lambda: (step_at(0), Facts(topic="end", values={0: _END, 1: {**_SHORT, "reason": "exception: KeyError"}})),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._armed: dict[int, bool] = {}  # optimizer -> the ranks had the same number of reductions
        self._micro: dict[int, dict[int, int]] = {}  # optimizer -> rank -> micro-batches of its last regular step
        self._missed: dict[int, tuple[int, int]] = {}  # optimizer -> last step a rank lacked, number in a row
        self._complete: set[int] = set()
        self._loose: set[int] = set()
        self._fired = False

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        return finding.phase != "skipped"

    def rank_classes(self, step: Step) -> RankClasses | None:
        if len(step.rows) < 2 or step.any(Flag.IN_JOIN) or not self._armed.get(step.optimizer):
            return None
        if separate_groups(step):  # nothing ties the groups together
            return None
        counts = {rank: row.syncs for rank, row in step.rows.items()}
        least = min(counts.values())
        if step.chosen and least < max(counts.values()):  # `wants_all` asks who else
            return None
        return {rank: count - least for rank, count in counts.items()} if len(set(counts.values())) > 1 else {}

    def wants_all(self, step: Step) -> bool:
        apart = len({row.syncs for row in step.rows.values()}) > 1
        return apart and bool(self._armed.get(step.optimizer)) and not step.any(Flag.IN_JOIN)

    def detect(self, step: Step) -> Findings:
        yield from super().detect(step)
        yield from self._absent(step)

    def remember(self, step: Step, classes: RankClasses | None) -> None:
        if classes or not step.complete or step.world < 2:
            return
        counts = {row.syncs for row in step.rows.values()}
        self._armed[step.optimizer] = len(counts) == 1 and 0 not in counts
        self._micro[step.optimizer] = {rank: row.micro_batches for rank, row in step.rows.items()}

    def report(self, step: Step, classes: RankClasses) -> Findings:
        self._fired = True
        usual = self._micro.get(step.optimizer, {})
        odd = tuple(r for r, row in step.rows.items() if row.micro_batches != usual.get(r, row.micro_batches))
        voted = outvoted(dict(classes))
        decided = odd if 0 < len(odd) < len(step.rows) and len(voted) == len(step.rows) else voted
        yield self.finding(
            step,
            ranks=decided,
            subject=(f"optimizer {step.optimizer}",),
            phase="skipped",
            evidence={
                "reductions": {str(rank): row.syncs for rank, row in step.rows.items()},
                "micro_batches": {str(rank): row.micro_batches for rank, row in step.rows.items()},
                "at_step": step.step,
            },
        )

    def _absent(self, step: Step) -> Findings:
        if step.any(_LOOSE) or separate_groups(step):
            self._loose.add(step.optimizer)
        if step.complete:
            self._complete.add(step.optimizer)
            return
        if step.any(Flag.ALONE):
            return
        gone = tuple(rank for rank in range(step.world) if rank not in step.everyone)
        ended = set(step.facts.get("end", ()))
        if step.optimizer in self._loose or step.optimizer not in self._complete or ended & set(gone):
            return
        # by their numbers: a step that some rank lacks may be judged long after the complete ones that follow it
        last, number = self._missed.get(step.optimizer, (step.step, 0))
        number = number + 1 if step.step == last + 1 else 1
        self._missed[step.optimizer] = step.step, number
        enough = int(self.missing_steps)
        if number >= enough:
            self._fired = True
            yield self.finding(
                step,
                step=step.step - enough + 1,
                ranks=gone,
                subject=(f"optimizer {step.optimizer}",),
                phase="missing",
                evidence={"stepped": sorted(step.everyone), "missing": list(gone)},
            )

    def compare(self, topic: str, facts: Mapping[int, End]) -> Findings:
        told = dict(sorted(facts.items()))
        regular = all([parse_end(fact.reason).is_in_order for fact in told.values()])
        if self._fired or not regular or len(told) < 2:
            return
        counts = {rank: {int(k): n for k, n in fact.steps.items()} for rank, fact in told.items()}
        for optimizer in sorted(set.intersection(*(set(own) for own in counts.values()))):
            taken = {rank: own[optimizer] for rank, own in counts.items()}
            if len(set(taken.values())) == 1 or optimizer in self._loose or optimizer not in self._complete:
                continue
            yield self.finding(
                step=min(taken.values()),
                last_step=max(taken.values()),
                ranks=outvoted(taken),
                subject=(f"optimizer {optimizer}",),
                phase="end",
                evidence={"steps": {str(rank): count for rank, count in taken.items()}},
            )
