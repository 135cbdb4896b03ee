"""What a loss curve looks like, in the field's words and with the steps that show it: for the rules and the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdebug.detectors.hlth.curve import Evaluation, Limit, Series, noise, period, series_of, swing, trend
from ddpdebug.detectors.thresholds import threshold

_TINY = 1e-12  # in place of a level of 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a loss curve looks like, and the steps that show it."""

    kind: str
    since: int
    until: int

    def __str__(self) -> str:
        return f"{self.kind}, steps {self.since} to {self.until}"


# --- training loss ----------------------------------------------------------------------------------------------------


def diverged(series: Series, limit: Limit) -> bool:
    """Tell whether the newest losses have left the earlier level upwards and stay away."""
    losses, count = list(series.losses), int(limit("diverged_steps"))
    if len(losses) < 2 * count or not math.isfinite(series.best):
        return False
    last = losses[-count:]
    first, best = series.first, series.best
    scale = max(first - best, series.best_spread, limit("diverged_floor") * abs(best), _TINY)
    halves = statistics.median(last[: count // 2]), statistics.median(last[count // 2 :])
    lowest, rise = min(last), statistics.median(last) - best
    recent = rise - (statistics.median(losses[-2 * count : -count]) - best)
    far = (
        lowest > best + limit("diverged_factor") * scale
        and lowest > best + abs(best)
        and lowest > first + limit("diverged_first") * abs(first)
    )
    # a target that moves takes the loss along slowly; what breaks does it at once, or faster and faster
    return far and halves[1] >= limit("diverged_falling") * halves[0] and recent > limit("diverged_recent") * rise


def lost(series: Series, limit: Limit) -> bool:
    """Tell whether what the loss had gained during a warm-up is lost again, while the rate rises or soon after."""
    half = int(limit("diverged_steps"))
    warm = series.rates[-1] > series.restart * series.best_rate or series.count < limit("lost_warm_up") * series.risen
    if len(series.losses) < 2 * half or not warm or series.again:
        return False
    gained = series.first - series.best
    if gained < limit("lost_progress") * abs(series.first):
        return False
    last = series.last(2 * half)
    earlier, later = statistics.median(last[:half]), statistics.median(last[half:])
    away = min(earlier, later) > series.best + limit("lost_progress") * gained
    return away and later >= limit("diverged_falling") * earlier


def classify(
    steps: Sequence[int],
    losses: Sequence[float],
    config: Mapping[str, Any] | None = None,
    validation: Sequence[tuple[int, float]] = (),
) -> Shape | None:
    """Say what a whole curve looks like; None if it is too short.

    Args:
        validation: (step, validation loss), as far as it was told.

    Returns:
        healthy, flat, plateau, underfitting (a hint), oscillating, diverging, spike, rising, overfitting or delayed
        generalisation.
    """

    def limit(name: str) -> float:
        return threshold(config or {}, name)

    if len(losses) < limit("shape_steps"):
        return None
    series = series_of(limit)
    for step, loss in zip(steps, losses, strict=True):
        series.add(step, loss, math.nan)
    if diverged(series, limit):
        return Shape("diverging", series.steps[-int(limit("diverged_steps"))], steps[-1])
    window = series.last(int(limit("oscillation_window")))
    level = abs(statistics.median(window)) or _TINY
    swings = len(window) >= limit("oscillation_least") and swing(window) >= limit("oscillation_amplitude") * level
    if swings and period(window, limit) is not None:
        return Shape("oscillating", steps[-len(window)], steps[-1])
    history = _evaluations(steps, losses, validation)
    validated = late(history, series.first, limit) or overfitting(history, limit)
    if validated is not None:
        return validated
    change, errors = trend(losses)
    fallen = fell(series.first, losses, limit)
    if _is_flat(change, errors, level, limit) and not fallen:
        return Shape("flat", steps[0], steps[-1])
    return _settled(steps, losses, history, limit, falls=fallen or change < 0)


def fell(first: float, losses: Sequence[float], limit: Limit) -> bool:
    """Tell whether a loss that is flat now lies below its first level, further than by chance: it fell at once."""
    level = statistics.median(losses[-max(1, len(losses) // 3) :])
    error = 1.2533 * noise(losses) / math.sqrt(limit("level_steps"))
    least = max((1 - limit("plateau_fallen")) * abs(first), limit("shape_errors") * error)
    return first - level > least


def _is_flat(change: float, errors: float, level: float, limit: Limit) -> bool:
    uncertain = abs(errors) < limit("shape_errors") or abs(change) < limit("flat_certain") * level
    return uncertain and abs(change) < limit("flat_change") * level


def _settled(
    steps: Sequence[int], losses: Sequence[float], history: Sequence[Evaluation], limit: Limit, *, falls: bool
) -> Shape:
    begin = len(losses) // 3
    tail = list(losses[begin:])
    level = abs(statistics.median(tail)) or _TINY
    later, errors = trend(tail)
    if falls and _is_flat(later, errors, level, limit):
        first = statistics.median(losses[: int(limit("level_steps"))])
        high = underfits([e for e in history if e.step >= steps[begin]], level, first, limit)
        return Shape("underfitting (a hint)" if high else "plateau", steps[begin], steps[-1])
    highest = max(range(len(losses)), key=lambda i: losses[i])
    near = int(limit("spike_before"))
    around = [*losses[max(0, highest - near) : highest], *losses[highest + 1 : highest + 1 + near]]
    middle, spread = statistics.median(around), max(around) - min(around)
    height = max(limit("spike_height") * spread, limit("spike_level") * abs(middle))
    if highest >= limit("spike_warm_up") and losses[highest] - middle > height:
        return Shape("spike", steps[highest], steps[highest])
    return Shape("healthy" if falls else "rising", steps[0], steps[-1])


# --- training and validation loss -------------------------------------------------------------------------------------


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


def overfitting(history: Sequence[Evaluation], limit: Limit) -> Shape | None:
    """Return since when the validation loss rises while the training loss falls."""
    strips = int(limit("overfit_evaluations"))
    if len(history) < strips + 2:
        return None
    best = best_of(history)
    last = [evaluation.validation for evaluation in history[-strips:]]
    above = best.validation + limit("overfit_rise") * abs(best.validation)
    rises = min(last) > above and last[-1] == max(last) and best.step < history[-strips].step
    if rises and history[-1].training < best.training and _stands_out(history, history.index(best), strips, limit):
        return Shape("overfitting", best.step, history[-1].step)
    return None


def _stands_out(history: Sequence[Evaluation], best: int, count: int, limit: Limit) -> bool:
    """Tell whether the newest evaluations lie above those around the best by more than the noise between neighbours."""
    values = [evaluation.validation for evaluation in history]
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    deviation = 1.4826 * statistics.median(bends) / math.sqrt(6)  # of the second differences: a trend has no part in it
    around = values[max(0, best - 1) : best + 2]
    return statistics.median(values[-count:]) - statistics.median(around) > limit("overfit_certain") * deviation


def late(history: Sequence[Evaluation], first: float, limit: Limit) -> Shape | None:
    """Return since when the validation loss waited that has fallen long after the training loss was small."""
    steady = int(limit("delayed_steady"))
    small = limit("delayed_training") * abs(first)
    waited: tuple[Evaluation, Evaluation] | None = None  # the best one that was not beaten for so long, the last wait
    best, count = None, 0
    for evaluation in history[:-steady]:
        if best is None or improves(evaluation, best, limit):
            best, count = evaluation, 0
        else:
            count += evaluation.training <= small
        if count >= limit("delayed_evaluations"):
            waited = best, evaluation
    if waited is None:
        return None
    low = waited[0].validation - limit("delayed_fall") * abs(waited[0].validation)
    falls = all(evaluation.validation < low for evaluation in history[-steady:])
    return Shape("delayed generalisation", waited[0].step, history[-1].step) if falls else None


def underfits(history: Sequence[Evaluation], level: float, first: float, limit: Limit) -> bool:
    """Tell whether training and validation loss of a plateau are stuck, high and close together."""
    if len(history) < limit("underfit_evaluations") or level < limit("underfit_level") * abs(first):
        return False
    half = len(history) // 2
    values = [evaluation.validation for evaluation in history]
    stuck = statistics.median(values[:half]) - statistics.median(values[-half:]) < limit("flat_change") * level
    gap = abs(statistics.median(values) - statistics.median(evaluation.training for evaluation in history))
    return stuck and gap < limit("underfit_gap") * level


def best_of(history: Sequence[Evaluation]) -> Evaluation:
    """Return the first evaluation with the lowest validation loss."""
    return min(history, key=lambda evaluation: evaluation.validation)


def improves(evaluation: Evaluation, best: Evaluation, limit: Limit) -> bool:
    """Tell whether a validation loss is better by more than the chance that many values have."""
    return evaluation.validation < best.validation - limit("improvement") * abs(best.validation)
