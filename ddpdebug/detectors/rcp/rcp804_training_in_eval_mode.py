"""RCP804: a training forward runs in eval mode."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Severity
from ddpdebug.detectors.rcp.habits import StepHabit
from ddpdebug.schema.details import EvalForwards
from ddpdebug.schema.row import Flag

_EVAL: dict[int, Any] = {r: {"modes": {"modules": ["drop", "bn1"], "location": "train.py:40"}} for r in range(4)}

_OF_A_PART = (
    "`from the start`: a pretrained part that its loading function (`from_pretrained`) returns in eval mode",
    "`later`: `eval()` called on that part alone, to look at its features, without `train()` afterwards",
    "a new model around it: a module is made in train mode, and leaves what it is given as it is",
)


class TrainingInEvalMode(StepHabit):
    """The forwards that train ran in eval mode, although the model holds modules whose behaviour depends on it.

    Impact: dropout is off and BatchNorm uses and no longer updates its running statistics: regularisation is
    missing and statistics go stale.

    Diagnosis: list `[n for n, m in model.named_modules() if not m.training]` at the named step and see since when:
    from step 0, or from the first evaluation on. A part is named where all of it trains and drops something, while the
    model is in train mode; one with a frozen parameter inside, or a single module, is held in eval mode on purpose.

    Causes:
    - `model.eval()` in the evaluation function without `model.train()` afterwards
    - `train()` called once before the epoch loop while evaluation runs inside it
    - a pretrained model that its loading function returns in eval mode
    - `train()` called on another object than the one that is trained (a copy, a submodule)

    Remedy:
    - call `model.train()` at the start of each training phase and after each evaluation, or let the evaluation
      restore the mode it found
    - freeze BatchNorm explicitly, per module, if that is what was wanted, and repeat it after each `train()`, which
      resets all submodules
    """

    code = "RCP804"
    severity = Severity.ERROR
    title = "a training forward runs in eval mode"
    flag = Flag.EVAL_MODE
    unless = Flag.MODES_MIXED | Flag.MODE_CHANGES_NOTHING  # somebody chose among them, or it makes no difference
    key = "modes"
    fires_on = Examples(
        lambda: steps(3, flags=Flag.EVAL_MODE, recipe=_EVAL),
        lambda: (*steps(4), *steps(3, start=4, flags=Flag.EVAL_MODE, recipe=_EVAL)),
    )
    silent_on = Examples(
        lambda: steps(6),
        lambda: steps(2, flags=Flag.EVAL_MODE, recipe=_EVAL),
        lambda: steps(4, flags=Flag.EVAL_MODE | Flag.MODES_MIXED, recipe=_EVAL),  # BatchNorm alone
        lambda: steps(4, flags=Flag.EVAL_MODE | Flag.MODE_CHANGES_NOTHING, recipe=_EVAL),  # a frozen body
        lambda: (step_at(0, flags=Flag.EVAL_MODE), step_at(1), *steps(2, start=2, flags=Flag.EVAL_MODE), step_at(4)),
    )

    def describe(self, about: EvalForwards) -> dict[str, Any] | None:
        evidence = {"layers_that_eval_mode_changes": len(about.modules)}
        if about.part is None:
            return {"subject": about.modules[:MAX_NAMES], "location": about.location, "evidence": evidence}
        title = "a part of the model is in eval mode while it trains"
        subject = (about.part, *about.modules[: MAX_NAMES - 1])
        return {
            "title": title,
            "subject": subject,
            "location": about.location,
            "evidence": evidence,
            "causes": _OF_A_PART,
        }
