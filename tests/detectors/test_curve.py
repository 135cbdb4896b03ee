"""The shape of a loss curve, and that it is read from each optimizer's own losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.hlth.curve import autocorrelation, detrended, loss_of, noise, period, trend, wobble
from ddpdebug.detectors.hlth.shapes import classify
from ddpdebug.detectors.thresholds import threshold
from ddpdebug.observations import Flag

_LIMIT = partial(threshold, {})


@pytest.mark.parametrize(
    "kind, loss",
    [
        ("healthy", lambda i: 2.0 * 0.97**i + 0.1 + 0.03 * wobble(i)),
        ("flat", lambda i: 2.3 + 0.05 * wobble(i)),
        ("plateau", lambda i: 1.0 + 2.0 * 0.8**i + 0.01 * wobble(i)),
        ("oscillating", lambda i: 2.0 + 0.8 * math.sin(i / 2) + 0.05 * wobble(i)),
        ("oscillating", lambda i: 2.0 + 0.8 * (-1) ** i + 0.05 * wobble(i)),
        ("diverging", lambda i: 2.0 - 0.02 * i if i < 80 else 1.4**(i - 80)),
        ("spike", lambda i: 2.0 - 0.01 * i + 0.02 * wobble(i) + (9.0 if i == 50 else 0.0)),
        ("rising", lambda i: 0.7 + 0.01 * i + 0.05 * wobble(i)),
    ],
)  # fmt: skip
def test_shapes(kind: str, loss: Callable[[int], float]) -> None:
    """Each curve gets its name, and the steps that show it."""
    shape = classify(range(100), [loss(i) for i in range(100)])
    assert shape is not None
    assert shape.kind == kind
    assert 0 <= shape.since <= shape.until <= 99


def test_a_short_curve_has_no_shape() -> None:
    """A dozen losses say nothing."""
    assert classify(range(12), [1.0] * 12) is None


def test_numbers() -> None:
    """Noise is that from step to step, whatever the trend; a line has a trend and no period."""
    line = [0.1 * i for i in range(60)]
    assert trend(line)[0] == pytest.approx(4.0)
    assert max(map(abs, detrended(line))) < 1e-9
    noisy = [0.1 * i + 0.01 * wobble(i) for i in range(60)]
    assert noise(noisy) < 0.11
    assert trend(noisy)[1] > 10
    assert trend([1.0] * 30) == (0.0, 0.0)
    assert period(noisy, _LIMIT) is None
    assert autocorrelation([1.0, -1.0] * 20, 1) == pytest.approx(-1.0)
    assert period([float(i % 2) for i in range(40)], _LIMIT) is not None


def test_the_loss_of_a_step_is_the_mean_over_its_ranks() -> None:
    """A step that was skipped, or lacks a rank's loss, has none."""
    assert loss_of(step_at(3, world=2, odd={0: {"loss": 1.0}, 1: {"loss": 3.0}})) == 2.0
    assert loss_of(step_at(3, world=2, odd={0: {"loss": math.nan}})) is None
    assert loss_of(step_at(3, world=2, flags=Flag.SKIPPED)) is None
