"""How the loss of one batch went when it was trained on again and again, and what each way of failing suggests. Pure.

The floor of a loss is not known (label smoothing, variational terms and rewards have others than zero), so that only
what holds for every loss fails: nothing moved, it went up, or it is no number. A floor well above zero is a warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from statistics import median

#: A batch counts as memorised when nine tenths of its loss are gone: with 10 classes, 2.3 becomes 0.23, which is the
#: right class with a probability of 0.8 on average.
MEMORISED = 0.1
#: Below this part it may stay: with 10 classes, label smoothing of 0.1 leaves 0.22 and a variational term some more,
#: while a softmax before the cross-entropy leaves 0.63, and with 2 classes 0.45.
FLOOR = 0.3
#: A loss without a zero (rewards, likelihoods) has learned when it fell by this part of its size.
FELL = 0.1
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


class Shape(StrEnum):
    """How a curve went."""

    LEARNED = "memorised"
    FALLING = "still falling"
    FLOOR = "memorised down to a floor"
    PLATEAU = "plateau"
    STUCK = "stuck at the initial value"
    OSCILLATING = "oscillating"
    WORSE = "rising"
    NONFINITE = "not finite"


def shape_of(losses: Sequence[float]) -> Shape:
    """Say how a curve went; the first loss is the one before any update."""
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
    """Say how a curve ends that came down, but not all the way."""
    quarter = losses[-max(4, len(losses) // 4) :]
    before, after = median(quarter[: len(quarter) // 2]), median(quarter[len(quarter) // 2 :])
    if 0 < last <= FLOOR * first:
        return Shape.FLOOR
    enough = min(STILL_FALLING * abs(before), STEADY * (first - min(losses)))
    return Shape.FALLING if before - after > max(enough, 1e-12) else Shape.PLATEAU


def has_learned(first: float, last: float) -> bool:
    """Tell whether a batch has been memorised."""
    return last <= MEMORISED * first if first > 0 else first - last > FELL * abs(first)


def ending(losses: Sequence[float]) -> float:
    """Return the loss at the end: the middle one of the last tenth."""
    return median(losses[-max(1, len(losses) // 10) :])


def _swings(losses: Sequence[float], first: float) -> bool:
    half = losses[len(losses) // 2 :]
    steps = [b - a for a, b in pairwise(half)]
    if len(steps) < 4:
        return False
    turns = sum(a * b < 0 for a, b in pairwise(steps)) / (len(steps) - 1)
    won = max(first - min(losses), STILL * abs(first), 1e-12)
    return turns > TURNS and median(map(abs, steps)) > SWING * won


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
