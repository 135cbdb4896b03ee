"""The shape of a loss curve, and that it is read from each optimizer's own losses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.hlth.curve import autocorrelation, detrended, loss_of, losses, noise, sample_noise, trend
from ddpdebug.detectors.hlth.hlth711_loss_oscillates import LossOscillates
from ddpdebug.detectors.hlth.hlth712_overfitting import Overfitting
from ddpdebug.detectors.hlth.shapes import classify
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag


@pytest.mark.parametrize(
    "kind, loss",
    [
        ("healthy", lambda i: 2.0 * 0.97**i + 0.1 + 0.03 * sample_noise(i)),
        ("flat", lambda i: 2.3 + 0.05 * sample_noise(i)),
        ("plateau", lambda i: 1.0 + 2.0 * 0.8**i + 0.01 * sample_noise(i)),
        ("plateau", lambda i: 1.0 + 0.7 * 0.5**i + 0.02 * sample_noise(i)),  # fell at once
        ("oscillating", lambda i: 2.0 + 0.8 * math.sin(i / 2) + 0.05 * sample_noise(i)),
        ("oscillating", lambda i: 2.0 + 0.8 * (-1) ** i + 0.05 * sample_noise(i)),
        ("diverging", lambda i: 2.0 - 0.02 * i if i < 80 else 1.4**(i - 80)),
        ("spike", lambda i: 2.0 - 0.01 * i + 0.02 * sample_noise(i) + (9.0 if i == 50 else 0.0)),
        ("rising", lambda i: 0.7 + 0.01 * i + 0.05 * sample_noise(i)),
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
    noisy = [0.1 * i + 0.01 * sample_noise(i) for i in range(60)]
    assert noise(noisy) < 0.11
    assert trend(noisy)[1] > 10
    assert trend([1.0] * 30) == (0.0, 0.0)
    assert LossOscillates().period(noisy) is None
    assert autocorrelation([1.0, -1.0] * 20, 1) == pytest.approx(-1.0)
    assert LossOscillates().period([float(i % 2) for i in range(40)]) is not None


def test_the_loss_of_a_step_is_the_mean_over_its_ranks() -> None:
    """A step that was skipped, or lacks a rank's loss, has none."""
    assert loss_of(step_at(3, world=2, odd={0: {"loss": 1.0}, 1: {"loss": 3.0}})) == 2.0
    assert loss_of(step_at(3, world=2, odd={0: {"loss": math.nan}})) is None
    assert loss_of(step_at(3, world=2, flags=Flag.SKIPPED)) is None


def _validated(i: int, value: float) -> float:
    return math.nan if (i + 1) % 5 else value


@pytest.mark.parametrize(
    "kind, loss, validation",
    [
        ("overfitting", lambda i: 2.0 * 0.97**i, lambda i: 1.0 + 0.01 * abs(i - 50)),
        ("healthy", lambda i: 2.0 * 0.97**i + 0.1, lambda i: 2.1 * 0.97**i + 0.2),
        ("delayed generalisation", lambda i: 2.0 * 0.9**i, lambda i: 1 + 0.01 * i if i < 80 else 2 * 0.9 ** (i - 80)),
        ("plateau", lambda i: 1.0 + 2.0 * 0.8**i + 0.01 * sample_noise(i), lambda i: 1.6),  # a gap: no underfitting
        ("plateau", lambda i: 0.3 + 2.7 * 0.8**i + 0.003 * sample_noise(i), lambda i: 0.3),  # low
        ("underfitting (a hint)", lambda i: 2.0 + 1.0 * 0.8**i + 0.01 * sample_noise(i), lambda i: 2.05),
    ],
)  # fmt: skip
def test_shapes_with_a_validation_loss(
    kind: str, loss: Callable[[int], float], validation: Callable[[int], float]
) -> None:
    """What only the validation loss tells: too little capacity, too much, or a generalisation that comes late."""
    told = [(i, validation(i)) for i in range(120) if (i + 1) % 5 == 0]
    shape = classify(range(120), [loss(i) for i in range(120)], {}, told)
    assert shape is not None
    assert shape.kind == kind
    assert 0 <= shape.since < shape.until <= 119


def test_losses_of_one_kind_are_followed() -> None:
    """Another loss that comes in turn is not; one that takes over is, as a curve that begins with it."""
    rule = LossOscillates()
    for step in losses(40, lambda i: 9.0 if i % 4 == 3 else 1.0, loss_kind=lambda i: 5 if i % 4 == 3 else 6):
        assert not [*rule.detect(step)]
    assert [*rule.series[0].losses] == [1.0] * 30
    for step in losses(20, lambda i: 7.0, loss_kind=7):
        assert not [*rule.detect(step)]
    # The second is absent once at most before, so that another kind is followed after three absences.
    assert [*rule.series[0].losses] == [7.0] * 19


def test_a_validation_loss_that_comes_with_another_loss_is_kept() -> None:
    """It is judged in the next step of the kind that is followed."""
    rule = Overfitting()
    told = {"val_loss": lambda i: 2.0 if i == 7 else math.nan, "loss_kind": lambda i: 1 + (i % 4 == 3)}
    for step in losses(10, lambda i: 1.0, **told):
        assert not [*rule.detect(step)]
    assert [(found.step, found.validation) for found in rule.history[0]] == [(8, 2.0)]


def test_overfitting_is_not_forever() -> None:
    """A validation loss that rises and falls late is overfitting for a time, and then delayed generalisation."""
    diagnosis, rule = Diagnosis(world=2), Overfitting()
    found: list[Finding] = []
    holds: list[int] = []
    for step in losses(
        200,
        lambda i: 2.0 * 0.9**i + 1e-4 * sample_noise(i),
        val_loss=lambda i: _validated(i, 1.0 + 0.01 * i if i < 120 else 2.2 * 0.9 ** (i - 120)),
    ):
        diagnosis.feed(step)
        found += [finding for finding, new in diagnosis.tick() if new]
        list(rule.detect(step))
        holds += [] if rule.can_show(step) else [step.step]
    told = [(finding.code, finding.severity, finding.phase) for finding in found]
    assert told == [("HLTH712", Severity.WARNING, None), ("HLTH716", Severity.INFO, "delayed")]
    assert found[1].evidence["curve"].startswith("delayed generalisation, steps 4 to 1")
    assert holds[0] == found[0].last_step
    assert 120 < holds[-1] < found[1].last_step
