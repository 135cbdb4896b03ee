"""RCP816: gradients are cleared between backward and the step that should use them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Fields, Findings, Severity, Step, Streak
from ddpdebug.detectors.rcp.habits import StepHabit
from ddpdebug.schema.details import DiscardedGradients, Recipe
from ddpdebug.schema.row import Flag, Row

_GONE: dict[int, Any] = {r: {"discarded": {"kind": "all", "count": 1, "location": "train.py:61"}} for r in range(4)}

_LEFT = "end of epoch"
_TAIL: Fields = {
    "severity": Severity.WARNING,
    "title": "the last micro-batches of each epoch are thrown away",
    "phase": "end of epoch",
    "causes": (
        "the number of batches is no multiple of the accumulation steps, and gradients are cleared as an epoch begins",
        "the condition for a step counts batches, and has no `or it is the last one`",
    ),
    "actions": (
        "step after the last batch of an epoch as well, with the loss divided by what its window holds",
        "or count micro-batches on over the epochs, and do not clear gradients between them",
    ),
}


def _tail(number: int, every: int = 4, **recipe: Any) -> tuple[Step, ...]:
    """Return steps of which some begin an epoch, and clear what was left over."""
    told = {r: {"discarded": {"kind": _LEFT, "count": 1, "location": "train.py:61", **recipe}} for r in range(4)}
    return tuple(
        step_at(n, flags=Flag.GRADS_DISCARDED, recipe=told) if n % every == 0 else step_at(n) for n in range(number)
    )


class GradientsThrownAway(StepHabit):
    """Gradients that a backward produced were cleared or set to `None` before any optimizer step had used them.

    Or the micro-batches that are left over as an epoch ends are, each time.

    Impact: the step does nothing, or uses only the last micro-batch: work of backward and reduction is thrown away.

    Diagnosis: write down the order of forward, backward, `zero_grad` and `step` for one iteration and one
    accumulation window. Look for a second object that clears the same parameters: a metric, a second optimizer, a
    gradient penalty, an adversarial step. A clearing on purpose (a skipped batch, a generator's gradients in the
    discriminator) is visible in the code.

    Causes:
    - `zero_grad()` placed between `backward()` and `step()`
    - `zero_grad()` in every micro-batch of an accumulation window
    - `model.zero_grad()` of one optimizer's loop clearing what another still needs
    - a clearing after an evaluation or a gradient probe in the middle of a window

    Remedy:
    - clear right after the step, and only there
    - under accumulation clear when the window ends
    - for probes and penalties use `torch.autograd.grad(loss, params)`, which does not touch `.grad`
    - with two optimizers clear by optimizer, not by model, and run each one's backward and step together
    """

    code = "RCP816"
    severity = Severity.ERROR
    title = "gradients are cleared after backward and before the optimizer step"
    flag = Flag.GRADS_DISCARDED
    unless = Flag.INPUT_GRADIENT  # those of an attack, or of a penalty, are thrown away on purpose
    key = "discarded"
    fires_on = Examples(
        lambda: steps(3, flags=Flag.GRADS_DISCARDED, recipe=_GONE),
        lambda: (*steps(2), *steps(3, start=2, flags=Flag.GRADS_DISCARDED)),
        lambda: _tail(9),
        lambda: steps(3, flags=Flag.GRADS_DISCARDED | Flag.GRADS_GONE | Flag.NOT_ONE_LINE | Flag.FEWER_FORWARDS),
    )
    silent_on = Examples(
        lambda: (
            steps(5),
            steps(2, flags=Flag.GRADS_DISCARDED, recipe=_GONE),
            _tail(8),
            _tail(20, kind="micro-batches"),  # batches that are skipped now and then
            (
                step_at(0, flags=Flag.GRADS_DISCARDED),
                step_at(1),
                step_at(2, flags=Flag.GRADS_DISCARDED),
            ),  # skipped batches
            *(  # a step uphill and back, a look at the gradients of one more loss
                steps(4, flags=Flag.GRADS_DISCARDED | Flag[other], recipe=_GONE)
                for other in ("INPUT_GRADIENT", "NOT_ONE_LINE", "FEWER_FORWARDS")
            ),
            steps(4, flags=Flag.GRADS_DISCARDED | Flag.GRADS_GONE | Flag.INPUT_GRADIENT),
        )
    )

    def shows(self, row: Row) -> bool:
        # micro-batches: of one line each, with a forward each
        several = row.has(Flag.NOT_ONE_LINE | Flag.FEWER_FORWARDS)
        return super().shows(row) and (row.has(Flag.GRADS_GONE) or not several)

    def shown(self, step: Step) -> Mapping[Hashable, bool] | None:
        """Count those that another epoch finds left over as well, with epochs between them."""
        found = super().shown(step)
        return {**found, _LEFT: True} if found and found[self.key] else found

    def report(self, step: Step, streaks: Mapping[Any, Streak]) -> Findings:
        discarded = [recipe.discarded for recipe in step.answers(Recipe).values()]
        left = any(about is not None and about.kind == _LEFT for about in discarded)
        if self.key in streaks or left:
            yield from super().report(step, {self.key: streaks.get(self.key) or streaks[_LEFT]})

    def describe(self, about: DiscardedGradients) -> dict[str, Any] | None:
        evidence = {"cleared": about.kind, "backwards_lost": about.count}
        return {"location": about.location, "evidence": evidence, **(_TAIL if about.kind == _LEFT else {})}
