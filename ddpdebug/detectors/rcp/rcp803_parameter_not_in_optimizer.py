"""RCP803: a trainable parameter is in no optimizer, or is held twice."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.detectors.rcp.habits import StepHabit
from ddpdebug.schema.announcements import MissingParameters
from ddpdebug.schema.details import SteppedTwice
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

_MISSING = {"kind": "missing", "step": 8, "missing": ["head.weight"], "number": 1, "share": 0.1, "orphans": []}
_TWICE: dict[int, Any] = {r: {"twice": {"other": "SGD", "names": ["head.weight"]}} for r in range(4)}


class ParameterNotInOptimizer(StepHabit, EventRule):
    """A trainable parameter that gets gradients is in no optimizer, or is stepped twice.

    Impact: missing: that part stays as initialised while its gradient is computed and reduced. Twice: it moves
    about twice as fast, with two sets of moments and decay.

    Diagnosis: compare by identity: `ids = [id(p) for o in optimizers for g in o.param_groups for p in g["params"]]`
    against `model.named_parameters()`; repeated ids are held twice. Find where the optimizer is built relative to
    the last change of the model, and read the name filters that build the groups.

    Causes:
    - `twice`: two optimizers that overlap, or one built from model and submodule both
    - a module added or replaced after the optimizer was built
    - name filters for decay and no decay that leave some parameters out
    - only a part of the model was given (`model.head.parameters()`)
    - a learnable loss or temperature outside the model that nobody added

    Remedy:
    - `twice`: give each parameter to one optimizer; torch refuses it twice in groups of one optimizer, and knows
      nothing of a second
    - build the optimizer last, from `model.named_parameters()`, and assert that the groups together hold each trainable
      parameter exactly once
    - freeze with `requires_grad_(False)` what is not meant to train
    """

    code = "RCP803"
    severity = Severity.ERROR
    title = "a trainable parameter is in no optimizer, or is held twice"
    titles: ClassVar[Mapping[str, str]] = {
        "missing": "a trainable parameter is in no optimizer",
        "twice": "a parameter is stepped by two optimizers",
    }
    events = ("audit:missing",)
    flag = Flag.STEPPED_TWICE
    key = "twice"
    missing_share = Threshold(
        0.5,
        "share of the model in no optimizer, above which only a part may be meant (`warning`)",
        source="fine-tuning trains the smaller part",
    )
    fires_on = Examples(
        lambda: Facts(topic="alone:audit", values={0: _MISSING, 1: _MISSING}),
        lambda: steps(3, optimizer=1, flags=Flag.STEPPED_TWICE, recipe=_TWICE),
        lambda: tuple(step_at(n, flags=n % 2 * Flag.STEPPED_TWICE, recipe=_TWICE) for n in range(6)),
    )
    silent_on = Examples(
        lambda: steps(5),
        lambda: steps(2, optimizer=1, flags=Flag.STEPPED_TWICE, recipe=_TWICE),
        lambda: tuple(step_at(n, flags=(n % 3 == 2) * Flag.STEPPED_TWICE, recipe=_TWICE) for n in range(12)),
        lambda: Facts(topic="alone:audit", values={0: {**_MISSING, "orphans": ["head.weight"]}}),  # RCP811
    )

    def shown(self, step: Step) -> Mapping[Hashable, bool] | None:
        """Leave out the steps between: of two optimizers of one model each second step has fresh gradients."""
        found, streak = super().shown(step), self._streaks.get((step.optimizer, self.key))
        between = streak is not None and step.step < streak.first + 2 * streak.length
        return None if between and not any((found or {}).values()) else found

    def describe(self, about: SteppedTwice) -> dict[str, Any] | None:
        evidence = {"held": "by two optimizers that step with the same gradients", "other": about.other}
        return {"subject": about.names[:MAX_NAMES], "phase": "twice", "evidence": evidence}

    def judge(self, fact: MissingParameters) -> Fields | None:
        if fact.orphans:
            return None
        # an optimizer that was given a small part of the model only may be meant so, one that trains nothing is not
        meant = self.missing_share < fact.share < 1
        return {
            "severity": Severity.WARNING if meant else self.severity,
            "subject": fact.missing[:MAX_NAMES],
            "phase": "missing",
            "evidence": {"parameters_in_no_optimizer": fact.number, "share_of_the_model": round(fact.share, 4)},
        }
