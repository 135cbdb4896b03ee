"""The shape of a whole loss curve, in the field's words and with the steps that show it, for the report. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddpdebug.detectors.hlth.curve import Evaluation, Shape, swing, trend
from ddpdebug.detectors.hlth.hlth708_loss_spike import LossSpike
from ddpdebug.detectors.hlth.hlth709_loss_flat import LossFlat
from ddpdebug.detectors.hlth.hlth710_loss_diverges import LossDiverges
from ddpdebug.detectors.hlth.hlth711_loss_oscillates import LossOscillates
from ddpdebug.detectors.hlth.hlth712_overfitting import Overfitting
from ddpdebug.detectors.hlth.hlth716_training_too_long import TrainingTooLong

_TINY = 1e-12  # in place of a level of 0


def classify(
    steps: Sequence[int],
    losses: Sequence[float],
    config: Mapping[str, Any] | None = None,
    validation: Sequence[tuple[int, float]] = (),
) -> Shape | None:
    """The shape of a whole curve, None if it is too short.

    Args:
        validation: (step, validation loss), as far as it was told.

    Returns:
        healthy, flat, plateau, underfitting (a hint), oscillating, diverging, spike, rising, overfitting or delayed
        generalisation.
    """
    diverges, oscillates, flat = LossDiverges(config), LossOscillates(config), LossFlat(config)
    if len(losses) < flat.shape_steps:
        return None
    series = flat.new_series()
    for step, loss in zip(steps, losses, strict=True):
        series.add(step, loss, math.nan)
    if diverges.diverged(series):
        return Shape("diverging", series.steps[-int(diverges.diverged_steps)], steps[-1])
    window = series.last(int(oscillates.oscillation_window))
    level = abs(statistics.median(window)) or _TINY
    swings = len(window) >= oscillates.oscillation_least and swing(window) >= oscillates.oscillation_amplitude * level
    if swings and oscillates.period(window) is not None:
        return Shape("oscillating", steps[-len(window)], steps[-1])
    history = _evaluations(steps, losses, validation)
    validated = TrainingTooLong(config).late(history, series.first) or Overfitting(config).overfitting(history)
    if validated is not None:
        return validated
    change, errors = trend(losses)
    fallen = flat.fell(series.first, losses)
    if flat.is_flat(change, errors, level) and not fallen:
        return Shape("flat", steps[0], steps[-1])
    return _settled(steps, losses, history, flat, LossSpike(config), falls=fallen or change < 0)


def _settled(
    steps: Sequence[int],
    losses: Sequence[float],
    history: Sequence[Evaluation],
    flat: LossFlat,
    spike: LossSpike,
    *,
    falls: bool,
) -> Shape:
    begin = len(losses) // 3
    tail = list(losses[begin:])
    level = abs(statistics.median(tail)) or _TINY
    later, errors = trend(tail)
    if falls and flat.is_flat(later, errors, level):
        first = statistics.median(losses[: int(flat.level_steps)])
        high = flat.underfits([e for e in history if e.step >= steps[begin]], level, first)
        return Shape("underfitting (a hint)" if high else "plateau", steps[begin], steps[-1])
    highest = max(range(len(losses)), key=lambda i: losses[i])
    near = int(spike.spike_before)
    around = [*losses[max(0, highest - near) : highest], *losses[highest + 1 : highest + 1 + near]]
    middle, spread = statistics.median(around), max(around) - min(around)
    height = max(spike.spike_height * spread, spike.spike_level * abs(middle))
    if highest >= spike.spike_warm_up and losses[highest] - middle > height:
        return Shape("spike", steps[highest], steps[highest])
    return Shape("healthy" if falls else "rising", steps[0], steps[-1])


def _evaluations(
    steps: Sequence[int], losses: Sequence[float], validation: Sequence[tuple[int, float]]
) -> list[Evaluation]:
    history: list[Evaluation] = []
    since = -1
    for step, value in validation:
        between = [loss for at, loss in zip(steps, losses, strict=True) if since < at <= step]
        if between and math.isfinite(value):
            history.append(Evaluation(step, value, statistics.median(between)))
            since = step
    return history
