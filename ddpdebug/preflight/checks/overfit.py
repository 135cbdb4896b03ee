"""The overfit check: trains a copy on one fixed batch; a model that cannot memorise a few samples cannot learn.

Everything that varies is held: the batch is the one that was captured (so that augmentation has been drawn once),
layers that drop something are off, and before every step the random state is put back, so that what noise is left in
the forward is the same each time. Where the script's optimizer does not get there, Adam tries at a few rates: that
tells a model that cannot from a recipe that cannot.

What a loss cannot fall below is known for label smoothing and for soft targets, and is taken off. For others it is not
known (variational terms, entropy bonuses, rewards), so that only what holds for every loss fails: nothing moved, it
went up, or it is no number. A floor well above zero is a warning, and no more than a note where the loss has terms
beside torch's loss function, or draws random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ddpdebug.clock import time
from ddpdebug.isolation.process_state import RandomState, kept_random_state
from ddpdebug.preflight.capture.copies import OptimizerFor, copied
from ddpdebug.preflight.observe import LossCall, observe
from ddpdebug.preflight.output.results import Check, Plot, Series, Status, Table
from ddpdebug.preflight.sandbox.trials import (
    NoGradientError,
    attempt,
    copy_of_batch,
    take_step,
)
from ddpdebug.preflight.subject import Subject
from ddpdebug.sinks.words import counted, number

NAME = "one batch"
CODE = "RCP814"
SECONDS = 15.0
STEPS = 200
#: Adam's default, and a decade on either side.
RATES = (1e-3, 1e-2, 1e-4)
#: The script's optimizer gets this share of the time, the others what is left.
_SHARE = 0.5
#: Fewer steps than these tell nothing about a curve.
_LEAST_STEPS = 12
#: A batch counts as memorised when nine tenths of its loss are gone: with 10 classes, 2.3 becomes 0.23, which is the
#: right class with a probability of 0.8 on average.
MEMORISED = 0.1
#: Below this part it may stay: with 10 classes, label smoothing of 0.1 leaves 0.22 and a variational term some more,
#: while a softmax before the cross-entropy leaves 0.63, and with 2 classes 0.45.
FLOOR = 0.3
#: A loss without a zero (rewards, likelihoods) has learned when it fell by this part of its size.
FELL = 0.1
#: A loss is its function's value where they differ by no more than this part.
_SAME = 1e-3
#: Less than this part of the initial loss is no movement: rounding and normalisation statistics move it by less.
STILL = 0.02
#: Ending this much above the beginning is no noise on a fixed batch.
WORSE = 0.2
#: From step to step the second half goes up and down by more than this part of all that was won, ...
SWING = 0.2
#: ... in more than this part of its steps.
TURNS = 0.4
#: The loss is still falling: between the halves of the last quarter by more than this share of itself, ...
STILL_FALLING = 0.05
#: ... or this part of all that was won: in a straight line down it is one eighth.
STEADY = 0.06


@dataclass(frozen=True, slots=True)
class Floor:
    """The known lower bound of a loss on one batch."""

    known: float = 0.0
    reason: str = ""  # why there may be more


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One attempt to memorise the batch."""

    recipe: str
    losses: tuple[float, ...]
    seconds: float
    floor: Floor = Floor()

    @property
    def shape(self) -> Shape:
        """The shape of the loss curve after subtracting the known lower bound."""
        shape = shape_of([loss - self.floor.known for loss in self.losses])
        fell = bool(self.losses) and self.losses[0] - ending(self.losses) > FELL * abs(self.losses[0])
        return Shape.UNKNOWN if shape is Shape.PLATEAU and self.floor.reason and fell else shape


def check(subject: Subject, *, seconds: float = SECONDS) -> list[Check]:
    """Train copies of the model on the first batch.

    Args:
        seconds: for all attempts together.
    """
    return attempt(NAME, lambda: _check(subject, seconds))


def _check(subject: Subject, seconds: float) -> list[Check]:
    try:
        return _attempts(subject, seconds)
    except NoGradientError as error:
        return [_hopeless(str(error), "RCP810", _CUT)]


def _attempts(subject: Subject, seconds: float) -> list[Check]:
    if not subject.batches:
        return [Check(Status.SKIPPED, "there are no batches")]
    if not any(p.requires_grad for p in subject.model.parameters()):
        words = "no parameter of the model is trainable: nothing can be memorised"
        return [_hopeless(words, CODE, _ALL_FROZEN)]
    began = time.monotonic()
    floor = _floor(subject)
    runs = []
    make = subject.optimizer_for
    if make is not None and all(group.get("lr") == 0 for group in make(copied(subject.model)).param_groups):
        make = None  # the loop sets the rate by hand, and begins at 0
    if make is not None:
        runs.append(_run(subject, "the script's optimizer", make, seconds * _SHARE, floor))
    if runs and _too_short(runs[0]):
        return [_too_slow(runs[0])]
    if not runs or runs[0].shape not in _HARMLESS:
        for i, rate in enumerate(RATES):
            left = (seconds - (time.monotonic() - began)) / (len(RATES) - i)
            runs.append(_run(subject, f"Adam, {number(rate)}", _adam(rate), left, floor))
            if runs[-1].shape is Shape.LEARNED or _too_short(runs[-1]):
                break
    if _too_short(runs[0]):
        return [_too_slow(runs[0])]
    return [verdict(runs, scripted=make is not None)]


def _too_short(run: Run) -> bool:
    return len(run.losses) < _LEAST_STEPS and run.shape is not Shape.NONFINITE


def _too_slow(run: Run) -> Check:
    each = run.seconds / len(run.losses)
    words = f"a step takes {each:.3g} s: allow {_LEAST_STEPS * each / _SHARE * 1.5:.0f} s for this check"
    return Check(Status.SKIPPED, words)


def _hopeless(words: str, code: str, causes: tuple[str, ...]) -> Check:
    actions = ("see in the step `parameters` what is trainable and what the loss reaches",)
    return Check(Status.FAIL, words, code=code, hypotheses=causes, actions=actions)


_ALL_FROZEN = ("everything was frozen, and what should be trained was not unfrozen",)
_CUT = (
    "the forward runs under `torch.no_grad()` or `inference_mode`",
    "a `detach()`, `.item()`, `.data` or a way through numpy between the model and the loss",
    "an integer or boolean in between: `argmax`, a comparison, a cast",
)


def _adam(rate: float) -> OptimizerFor:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)

    return make


def _run(subject: Subject, recipe: str, make: OptimizerFor, seconds: float, floor: Floor) -> Run:
    began = time.monotonic()
    with kept_random_state() as state:
        model = copied(subject.model)
        _still(model)
        optimizer = make(model)
        losses = _train(subject, model, optimizer, state, floor.known, lambda: time.monotonic() - began > seconds)
    return Run(recipe=recipe, losses=tuple(losses), seconds=time.monotonic() - began, floor=floor)


def _floor(subject: Subject) -> Floor:
    """Return what is known of the floor of the first batch's loss, from one computation of it."""
    model = copied(subject.model)
    _still(model)
    with kept_random_state() as state:
        state.restore()
        before = torch.random.get_rng_state()
        seen = observe(subject, copy_of_batch(subject.batches[0]), model)
        draws = not torch.equal(before, torch.random.get_rng_state())
    if seen.loss is None or not seen.calls:
        return Floor()
    loss = float(seen.loss.detach())
    values = [float(call.value.detach()) for call in seen.calls if call.value is not None and call.value.numel() == 1]
    if len(values) < len(seen.calls):
        return Floor()
    value = sum(values)
    share = loss / value if value else 0.0  # a loss may be divided by the number of micro-batches
    whole = abs(share * subject.micro_batches - 1) < _SAME or abs(share - 1) < _SAME
    known = sum(map(lowest_of, seen.calls)) * (share if whole else 1.0)
    reason = "" if whole else "it has terms beside torch's loss function"
    reason = reason or ("it draws random numbers" if draws else "")
    return Floor(known if known < loss else 0.0, reason)


def lowest_of(call: LossCall) -> float:
    """Return the lower bound of a loss call, the entropy of its targets; 0 if unknown."""
    target, weights = call.target.detach(), (call.settings.get("weight"), call.settings.get("pos_weight"))
    if call.reduction not in {"mean", "sum"} or any(w is not None for w in weights) or not target.numel():
        return 0.0
    if call.name.startswith("binary") and target.is_floating_point():
        share = target.double().clamp(0, 1)
        each = torch.special.entr(share) + torch.special.entr(1 - share)
    elif call.name == "cross_entropy" and call.prediction.dim():
        place = 1 if call.prediction.dim() > 1 else 0
        classes, smooth = call.prediction.shape[place], float(call.settings.get("label_smoothing", 0.0))
        if target.is_floating_point():
            each = torch.special.entr(target.double() * (1 - smooth) + smooth / classes).sum(place)
        else:
            others, own = smooth / classes, 1 - smooth + smooth / classes
            entropy = torch.special.entr(torch.tensor([own, others], dtype=torch.float64))
            number = target[target != int(call.settings.get("ignore_index", -100))].numel()
            each = (entropy[0] + (classes - 1) * entropy[1]).expand(number)
    else:
        return 0.0
    return float(each.mean() if call.reduction == "mean" else each.sum()) if each.numel() else 0.0


def _train(
    subject: Subject,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: RandomState,
    floor: float,
    over: Callable[[], bool],
) -> list[float]:
    losses: list[float] = []
    batch: Any = subject.batches[0]
    while not losses or (len(losses) <= STEPS and not over()):
        state.restore()
        losses.append(take_step(model, optimizer, subject.loss_of, [copy_of_batch(batch)]))
        if not math.isfinite(losses[-1]):
            break
        if len(losses) > _LEAST_STEPS and all(has_learned(losses[0] - floor, loss - floor) for loss in losses[-3:]):
            break
    return losses


def _still(model: torch.nn.Module) -> None:
    """Switch off what drops something: dropout of every kind, stochastic depth (timm's DropPath, torchvision's)."""
    for module in model.modules():
        if any("drop" in kind.__name__.lower() or kind.__name__ == "StochasticDepth" for kind in type(module).__mro__):
            module.eval()


def verdict(runs: list[Run], *, scripted: bool) -> Check:
    """Return the verdict on the attempts.

    Args:
        scripted: whether the first one is the script's own recipe.
    """
    first = runs[0]
    others = runs[1:] if scripted else runs
    better = [run for run in others if _better(run, first, scripted=scripted)]
    rescuer = min(better, key=lambda run: ending(run.losses), default=None)
    shape = first.shape
    words = f"loss {_way(first)} with {first.recipe}: {shape.value}"
    words += f" ({first.floor.reason})" if shape is Shape.UNKNOWN else ""
    causes: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    status = Status.INFO if shape is Shape.UNKNOWN else Status.PASS
    if not scripted:
        status, causes = (Status.PASS, ()) if rescuer else (_grave(shape), MODEL.get(shape, ()))
        words = f"loss {_way(rescuer or first)} with {(rescuer or first).recipe}: {(rescuer or first).shape.value}"
    elif shape not in _HARMLESS and rescuer is not None:
        status = Status.FAIL if shape in {Shape.WORSE, Shape.NONFINITE} else Status.WARN
        words += f"; {rescuer.recipe}, goes {_way(rescuer)}: the model can, the recipe cannot"
        causes = RECIPE[shape]
        actions = (
            "compare the script's learning rate with the sweep of the step `learning rate`",
            "see in the step `parameters` which parameters the optimizer holds",
        )
    elif shape not in _HARMLESS:
        status, causes = _grave(shape), MODEL[shape]
        words += "; Adam does not help"
        actions = (
            "print predictions beside targets on this batch; take two samples, then eight",
            "see in the steps `parameters` and `gradient flow` which parameters get a gradient",
        )
    return Check(
        status,
        f"{words} (dropout off, the batch and all randomness fixed)",
        code=CODE if status in {Status.WARN, Status.FAIL} else "",
        evidence={"first": first.losses[0], "last": ending(first.losses), "steps": len(first.losses) - 1},
        hypotheses=causes,
        actions=actions,
        plots=(_plot(runs),),
        tables=(_table(runs),) if len(runs) > 1 else (),
    )


def _grave(shape: Shape) -> Status:
    """A plateau may be the loss's own floor, and an oscillation noise that cannot be fixed."""
    if shape in _HARMLESS:
        return Status.PASS
    return Status.WARN if shape in {Shape.PLATEAU, Shape.OSCILLATING} else Status.FAIL


def _better(run: Run, first: Run, *, scripted: bool) -> bool:
    """Whether a run shows that the model can: it memorised the batch, or moved where the script's did not."""
    if run.shape in {Shape.LEARNED, Shape.FLOOR} or not scripted:
        return run.shape in _HARMLESS
    if first.shape is Shape.PLATEAU:
        return run.shape is Shape.FALLING and ending(run.losses) < ending(first.losses)
    return run.shape in {Shape.FALLING, Shape.PLATEAU}


def _way(run: Run) -> str:
    return f"{number(run.losses[0])} to {number(ending(run.losses))} in {counted(len(run.losses) - 1, 'step')}"


def _plot(runs: list[Run]) -> Plot:
    series = tuple(Series(name=run.recipe, x=tuple(range(len(run.losses))), y=run.losses) for run in runs)
    finite = [loss for run in runs for loss in run.losses if math.isfinite(loss)]
    wide = bool(finite) and min(finite) > 0 and max(finite) / min(finite) > 10
    return Plot(title="loss on one batch", x_label="step", y_label="loss", series=series, log_y=wide)


def _table(runs: list[Run]) -> Table:
    rows = tuple((r.recipe, r.losses[0], ending(r.losses), len(r.losses) - 1, r.shape.value) for r in runs)
    return Table(head=("optimizer", "first loss", "last loss", "steps", "went"), rows=rows)


class Shape(StrEnum):
    """The shape of a loss curve on one fixed batch."""

    LEARNED = "memorised"
    FALLING = "still falling"
    FLOOR = "memorised down to a floor"
    PLATEAU = "plateau"
    UNKNOWN = "a plateau that may be its floor"
    STUCK = "stuck at the initial value"
    OSCILLATING = "oscillating"
    WORSE = "rising"
    NONFINITE = "not finite"


def shape_of(losses: Sequence[float]) -> Shape:
    """Return the shape of a loss curve; the first loss is the one before any update."""
    if not losses or not all(map(math.isfinite, losses)):
        return Shape.NONFINITE
    first, last = losses[0], ending(losses)
    size = abs(first) or 1e-12
    if has_learned(first, last):
        return Shape.LEARNED
    if last > first + WORSE * size:
        return Shape.WORSE
    if _swings(losses, first):
        return Shape.OSCILLATING
    if first - min(losses) < STILL * size:
        return Shape.STUCK
    return _settled(losses, first, last)


def _settled(losses: Sequence[float], first: float, last: float) -> Shape:
    """Return the shape of a curve that fell, but not all the way."""
    quarter = losses[-max(4, len(losses) // 4) :]
    before, after = median(quarter[: len(quarter) // 2]), median(quarter[len(quarter) // 2 :])
    if 0 < last <= FLOOR * first:
        return Shape.FLOOR
    enough = min(STILL_FALLING * abs(before), STEADY * (first - min(losses)))
    return Shape.FALLING if before - after > max(enough, 1e-12) else Shape.PLATEAU


def has_learned(first: float, last: float) -> bool:
    """Whether a batch has been memorised."""
    return last <= MEMORISED * first if first > 0 else first - last > FELL * abs(first)


def ending(losses: Sequence[float]) -> float:
    """Return the loss at the end: the median of the last tenth."""
    return median(losses[-max(1, len(losses) // 10) :])


def _swings(losses: Sequence[float], first: float) -> bool:
    half = losses[len(losses) // 2 :]
    steps = [b - a for a, b in pairwise(half)]
    if len(steps) < 4:
        return False
    turns = sum(a * b < 0 for a, b in pairwise(steps)) / (len(steps) - 1)
    won = max(first - min(losses), STILL * abs(first), 1e-12)
    return turns > TURNS and median(map(abs, steps)) > SWING * won


_HARMLESS = (Shape.LEARNED, Shape.FLOOR, Shape.FALLING, Shape.UNKNOWN)
#: What may be behind each way of failing, the likeliest first: where another optimizer could not do it either, ...
MODEL = {
    Shape.STUCK: (
        "the loss does not reach the parameters: detached, frozen, not registered, under no_grad, an integer cast",
        "the outputs are saturated or constant: dead units, a sigmoid or softmax before the loss",
        "inputs and labels carry nothing that could be told apart: all samples alike, or contradictory labels",
    ),
    Shape.PLATEAU: (
        "a cap is active: softmax before the cross-entropy, clamped outputs, a target outside of the output's range",
        "the same input occurs with different labels in the batch, or labels are not aligned with inputs",
        "a floor by design: label smoothing, a variational term, an entropy bonus, noise in the forward",
        "the part that trains is too small: a large part of the model is frozen or not in the optimizer",
    ),
    Shape.OSCILLATING: (
        "the gradient points elsewhere than the loss: a hand-written backward, gradients not cleared, a custom step",
        "the loss jumps by itself: randomness that is not drawn from torch, numpy or random",
    ),
    Shape.WORSE: (
        "the sign of the loss or of a reward is turned",
        "the gradient is not that of the loss: a custom autograd function, a straight-through estimator, a detach",
        "initial weights so large that any rate breaks the model",
    ),
    Shape.NONFINITE: (
        "log, sqrt or a division at zero, or an overflow in half precision; see `ddpdebug run`",
        "the initial weights or the inputs are far too large",
    ),
}
#: ... and where plain Adam could.
RECIPE = {
    Shape.STUCK: (
        "the learning rate is far too low, or zero at the beginning of a schedule",
        "the optimizer holds other parameters than the model uses: built before a layer was replaced, or for a copy",
        "the learning rate is far too high: the first steps saturate every unit, and nothing moves any more",
        "gradients are clipped to next to nothing, or cleared before the step",
    ),
    Shape.PLATEAU: (
        "parameters are missing from the optimizer",
        "weight decay or clipping holds the weights back",
        "the learning rate is too high to settle, or too low to arrive in these steps",
    ),
    Shape.OSCILLATING: ("the learning rate is too high", "momentum or betas that are too large for it"),
    Shape.WORSE: ("the learning rate is far too high", "the optimizer maximises: `maximize=True`, a negative rate"),
    Shape.NONFINITE: ("the learning rate is far too high", "an optimizer without its epsilon in half precision"),
}
