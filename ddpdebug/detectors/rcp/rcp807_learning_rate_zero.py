"""RCP807: the learning rate is zero or never reaches the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Fields, Findings, Severity, Step, Threshold
from ddpdebug.schema.details import Recipe
from ddpdebug.schema.row import Flag

_ZERO: dict[int, Any] = {r: {"lr": [0.0]} for r in range(4)}
_ELSEWHERE: dict[int, Any] = {
    r: {"elsewhere": {"kind": "scheduler", "class": "StepLR", "location": "train.py:70"}} for r in range(4)
}
#: What differs by what was set in vain.
_SAID: dict[str, Fields] = {
    "attribute": {"causes": ("`optimizer.lr = x`: an attribute that nothing reads",)},
    "overwritten": {
        "title": "the learning rate that the script wrote into the groups is overwritten by the schedule's first step",
        "causes": (
            "the schedule took the rates when it was made, before the script scaled them (by the number of ranks, say)",
            "intended: a rate for the first steps only",
        ),
        "actions": (
            "scale the rate before the scheduler is made, best where the optimizer gets it",
            'or scale what the schedule begins with too: `group["initial_lr"]` and `scheduler.base_lrs`',
        ),
    },
    "factor": {
        "title": "the function of `LambdaLR` returns the learning rate, which is multiplied by the learning rate",
        "causes": ("the function returns `rate * factor` where `factor` is meant: the rate is squared",),
        "actions": ("return the factor alone, or give the optimizer a rate of 1.0",),
    },
    "group": {
        "title": "the learning rate of the first group is set again and again, and other groups keep theirs",
        "causes": (
            '`optimizer.param_groups[0]["lr"] = x`, and the optimizer has more groups (weight decay for some only)',
            "intended: groups whose rate does not change, with the optimizer's usual one",
        ),
        "actions": ('`for group in optimizer.param_groups: group["lr"] = x`',),
    },
}


class LearningRateZero(Detector):
    """The lr in the optimizer is 0 over a window, or the schedule moves a value that the optimizer does not read.

    Impact: parameters do not change although everything else works; momentum and moments fill up meanwhile.

    Diagnosis: print `[g["lr"] for g in optimizer.param_groups]` just before `step()` and `scheduler.optimizer is
    optimizer`. A warm-up by `LambdaLR` with factor `step / warmup` has lr 0 in its first step only: harmless.
    Compare the step count with the schedule's total.

    Causes:
    - `elsewhere`: the scheduler was built for an optimizer that has since been replaced or wrapped
    - `elsewhere`: `optimizer.lr = x` or `optimizer.defaults["lr"] = x`, which nothing reads
    - `elsewhere`: a rate that is written into the groups after the scheduler was made, which sets its own again
    - `elsewhere`: a function of `LambdaLR` that returns the rate and not a factor: the rate is squared
    - the schedule has reached its end: its total is too small (RCP806)
    - a warm-up that starts at 0 and is never advanced, or integer division in its factor
    - a group added later whose lr the schedule does not cover

    Remedy:
    - `elsewhere`: set `group["lr"] = x` for each group, or build the scheduler after the final optimizer
    - give the schedule the real number of steps and a floor (`eta_min`)
    - begin a warm-up at `(step + 1) / warmup`
    - after `load_state_dict` print the groups: the checkpoint's lr replaces the new one
    """

    code = "RCP807"
    severity = Severity.WARNING
    title = "the learning rate is zero, or changes to it do not reach the optimizer"
    titles: ClassVar[Mapping[str, str]] = {
        "zero": "the learning rate is zero",
        "elsewhere": "changes of the learning rate do not reach the optimizer",
    }
    wants = ("recipe",)
    rate_faded = Threshold(
        1e-05,
        "learning rate as a share of the largest one, below which it has ended",
        source="a cosine to zero spends the last 0.2 % of its steps there",
    )
    rate_faded_steps = Threshold(
        20,
        "steps in a row with so small a rate",
        source="a schedule that ends with a short run stays there for a step or two",
    )
    rate_faded_share = Threshold(
        0.05,
        "these steps as a share of all",
        source="chosen: many times what the end of a cosine takes",
    )
    rate_zero_steps = Threshold(
        5,
        "steps in a row with a rate of 0, or with a schedule that moves nothing",
        source="a warm-up that starts at 0 does so for one step",
    )
    fires_on = Examples(
        lambda: steps(5, lr=0.0, recipe=_ZERO),
        lambda: steps(5, flags=Flag.SCHEDULED_ELSEWHERE, recipe=_ELSEWHERE),
        lambda: (*steps(5), *steps(20, start=5, lr=1e-9, recipe=_ZERO)),
    )
    silent_on = Examples(
        lambda: steps(6),
        lambda: (step_at(0, lr=0.0), *steps(5, start=1)),  # a warm-up that starts at zero
        lambda: steps(5, lr=0.0, recipe={r: {"lr": [0.0, 0.1]} for r in range(4)}),
        lambda: (*steps(5), *steps(5, start=5, lr=1e-9)),  # the end of a cosine
        lambda: (*steps(1), *steps(1, start=6000), *steps(30, start=9970, lr=1e-9)),  # of a long one
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._runs: dict[tuple[int, str], tuple[int, int]] = {}  # (optimizer, what) -> (first step, steps)
        self._peak: dict[int, float] = {}
        zero, faded = self.rate_zero_steps, self.rate_faded_steps
        self._lengths = {"zero": zero, "faded": faded, "elsewhere": zero}  # what -> steps in a row

    def suspects(self, step: Step) -> bool:
        counted = [(what, self._run(step, what)[1]) for what in self._shown(step)]
        return any(self._lasts(step, what, n) and not self._lasts(step, what, n - 1) for what, n in counted)

    def _lasts(self, step: Step, what: str, number: int) -> bool:
        """Return whether so many steps in a row are enough."""
        share = self.rate_faded_share * step.step if what == "faded" else 0.0
        return number >= max(self._lengths[what], share)

    def detect(self, step: Step) -> Findings:
        shown = self._shown(step)
        for what in self._lengths if shown or self._runs else ():
            if what not in shown:
                self._runs.pop((step.optimizer, what), None)
                continue
            run = self._runs[step.optimizer, what] = self._run(step, what)
            if self._lasts(step, what, run[1]):
                yield from self._report(step, what, run[0])
                break
        rates = [row.lr for row in step.rows.values() if row.lr > 0]
        self._peak[step.optimizer] = max([self._peak.get(step.optimizer, 0.0), *rates])

    def _shown(self, step: Step) -> list[str]:
        rates = step.columns["lr"]
        if step.any(Flag.SCHEDULED_ELSEWHERE):
            return ["elsewhere"]
        if not rates or not all(rate >= 0 for rate in rates):  # also when it is not known
            return []
        if max(rates) == 0:
            return ["zero"]
        return ["faded"] if max(rates) < self._end(step) else []

    def _end(self, step: Step) -> float:
        """Return the rate below which a schedule has ended."""
        return self.rate_faded * self._peak.get(step.optimizer, 0.0)

    def _run(self, step: Step, what: str) -> tuple[int, int]:
        first, number = self._runs.get((step.optimizer, what), (step.step, 0))
        return (first if number else step.step), number + 1

    def _report(self, step: Step, what: str, first: int) -> Findings:
        recipes = step.answers(Recipe).values()
        rates = [rate for recipe in recipes for rate in recipe.lr if isinstance(rate, int | float)]
        limit = self._end(step)
        if what != "elsewhere" and any(rate > limit for rate in rates):
            self._runs[step.optimizer, what] = (first, -(10**9))  # another group of this optimizer learns
            return
        about = next((recipe.elsewhere for recipe in recipes if recipe.elsewhere is not None), None)
        evidence = {"lr": step.columns["lr"][0], "peak": self._peak.get(step.optimizer) or None, "observed": what}
        own = {} if about is None else _SAID.get(about.kind, {})
        yield self.finding(
            step,
            step=first,
            subject=() if about is None else (about.class_name,),
            phase=about.kind if about is not None and own else what,
            location=None if about is None else about.location,
            evidence=evidence,
            **own,
        )
