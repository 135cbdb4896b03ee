"""Every number that a rule about the health of training compares with, once: value, meaning, source. Torch-free.

Rules read it through `threshold`; users adjust it with `--threshold NAME=VALUE`. docs/thresholds.md is made from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpdebug.errors import UsageError, did_you_mean


@dataclass(frozen=True, slots=True)
class Threshold:
    """One number, and where it comes from."""

    name: str
    value: float
    meaning: str  # with its unit
    source: str
    codes: tuple[str, ...]


_CORPUS = "largest seen in healthy scripts of the corpus"
_SAGEMAKER = "Amazon SageMaker Debugger's built-in rule"

#: Sorted by name. A rule's warm-up and window are thresholds like its limits.
THRESHOLDS: tuple[Threshold, ...] = (
    Threshold(
        "clip_ratio",
        10.0,
        "the median norm of the window, as a multiple of the clipping threshold",
        f"{_CORPUS}: 7.6 (an actor-critic)",
        ("HLTH707",),
    ),
    Threshold(
        "clip_share",
        0.9,
        "share of the window's steps whose norm exceeds the clipping threshold",
        "Pascanu, Mikolov, Bengio 2013 mean clipping for rare large norms",
        ("HLTH707",),
    ),
    Threshold(
        "clip_window",
        32,
        "steps with clipping that are looked at together, after a warm-up of as many halves",
        "constant clipping is common in the first steps",
        ("HLTH707",),
    ),
    Threshold(
        "dead_inputs",
        256,
        "inputs (samples times positions) for which a unit must have been zero",
        "a unit that fires for 2 % of the inputs is silent for 256 of them in 0.6 % of cases",
        ("HLTH703",),
    ),
    Threshold(
        "dead_share",
        0.6,
        "share of a layer's units that were zero for all inputs",
        f"{_SAGEMAKER} DeadRelu: threshold_layer 50 %; {_CORPUS}: 0.46 (deep and narrow)",
        ("HLTH703",),
    ),
    Threshold(
        "diverged_explosion",
        100.0,
        "from this multiple of the first level on a divergence is certain (`error`), below it is a `warning`",
        "gradient descent beyond its stable rate grows geometrically; a moving target does not",
        ("HLTH710",),
    ),
    Threshold(
        "diverged_factor",
        3.0,
        "rise of the loss over its best level, as a multiple of all the progress before and of the best level's noise",
        "1 is a loss that is back where it began, as after a warm restart",
        ("HLTH710",),
    ),
    Threshold(
        "diverged_steps",
        8,
        "steps in a row that must lie above the earlier level",
        "spikes recover within less",
        ("HLTH710",),
    ),
    Threshold(
        "diverged_update",
        0.05,
        "update norm / weight norm from which on a divergence that is not certain is told",
        "50 times the 1e-3 of Karpathy's CS231n notes; a loss that follows a moving target rises at any rate",
        ("HLTH710",),
    ),
    Threshold(
        "flat_constant",
        1e-5,
        "relative spread of a loss that does not move although the batches change",
        f"{_SAGEMAKER} UnchangedTensor: rtol 1e-5",
        ("HLTH709",),
    ),
    Threshold(
        "flat_steps",
        200,
        "steps without a trend after which a loss is flat from the start, whatever else is known",
        "in so many steps a fall of 3 % stands out of noise of 5 % by 2.7 standard errors",
        ("HLTH709",),
    ),
    Threshold(
        "flat_steps_still",
        32,
        "the same where the weights hardly move (see `update_small`) or the loss is constant",
        "longer than a warm-up that begins at 0 takes to move the weights",
        ("HLTH709",),
    ),
    Threshold(
        "gradient_jump",
        20.0,
        "gradient norm as a multiple of the median of its history",
        f"{_CORPUS}: 5.8",
        ("HLTH701",),
    ),
    Threshold(
        "gradient_steps",
        3,
        "steps out of the last five whose norm must be that far up",
        "one outlier alone is a batch; clipping is made for it (Pascanu, Mikolov, Bengio 2013)",
        ("HLTH701",),
    ),
    Threshold(
        "init_explode",
        100.0,
        "growth of the activations' standard deviation from the first to the last hidden layer on the first batch",
        f"Glorot, Bengio 2010 and He et al. 2015 ask for a factor near 1; {_CORPUS}: 0.4",
        ("HLTH715",),
    ),
    Threshold(
        "init_vanish",
        1e-3,
        "the same, shrinking",
        "Glorot, Bengio 2010; smallest seen in healthy scripts of the corpus: 0.17",
        ("HLTH715",),
    ),
    Threshold(
        "never_changed_steps",
        16,
        "steps over which a parameter with gradients keeps all its bits",
        f"{_SAGEMAKER} UnchangedTensor waits for 3 steps; longer, because of warm-ups that begin at 0",
        ("HLTH713",),
    ),
    Threshold(
        "oscillation",
        0.6,
        "autocorrelation of the detrended loss at its period (at a period of two: its negative at one step)",
        "white noise of 32 steps exceeds 0.6 by chance in less than one of 1,000 windows (standard error 1/sqrt(n))",
        ("HLTH711",),
    ),
    Threshold(
        "oscillation_amplitude",
        0.25,
        "spread of the detrended loss (10th to 90th percentile) as a share of its level",
        "a swing that is smaller than this hides no progress",
        ("HLTH711",),
    ),
    Threshold(
        "oscillation_update",
        0.01,
        "update norm / weight norm from which on a loss that swings from step to step swings because of the updates",
        "ten times the 1e-3 of Karpathy's CS231n notes; two tasks in turn swing as well, at any rate",
        ("HLTH711",),
    ),
    Threshold(
        "overfit_evaluations",
        3,
        "evaluations in a row above the best validation loss",
        "Prechelt 1998, Early Stopping - But When?: criterion UP with several successive strips",
        ("HLTH712",),
    ),
    Threshold(
        "overfit_rise",
        0.05,
        "rise of the validation loss over its best value, relative",
        "Prechelt 1998: generalisation loss GL of 5 %",
        ("HLTH712",),
    ),
    Threshold(
        "plateau_steps",
        300,
        "steps without a trend, after the loss fell, that are a plateau (`info`)",
        "schedules plateau for shorter times between their drops",
        ("HLTH709",),
    ),
    Threshold(
        "saturated_share",
        0.8,
        "share of a hidden layer's outputs at the ends of their range: sigmoid and tanh within 0.01 of a limit, "
        "softmax rows with an entry above 0.99",
        f"{_SAGEMAKER} SaturatedActivation: 50 %; {_CORPUS}: 0.20",
        ("HLTH704",),
    ),
    Threshold(
        "spike_height",
        3.0,
        "height of a spike over the median, as a multiple of the range of the 64 steps before",
        f"{_CORPUS}: 1.2; wider than 3.5 deviations (Iglewicz, Hoaglin 1993): heavy tails",
        ("HLTH708",),
    ),
    Threshold(
        "spike_progress",
        0.2,
        "height of a spike as a share of what the loss has fallen since the start, at least",
        "the noise of a converged loss is small and its spikes harmless",
        ("HLTH708",),
    ),
    Threshold(
        "too_long_evaluations",
        10,
        "evaluations since the best validation loss, which is also at least half of all",
        f"{_SAGEMAKER} Overtraining: patience_validation 10",
        ("HLTH716",),
    ),
    Threshold(
        "update_large",
        0.3,
        "median over the weights of update norm / weight norm, from which on updates are too large",
        f"300 times the 1e-3 of Karpathy's CS231n notes; {_CORPUS}, after the first steps: 0.12",
        ("HLTH705",),
    ),
    Threshold(
        "update_small",
        1e-6,
        "the same, below which the weights hardly move",
        "a thousandth of the 1e-3 of Karpathy's CS231n notes; SageMaker's WeightUpdateRatio takes 1e-8",
        ("HLTH705", "HLTH709"),
    ),
    Threshold(
        "vanishing",
        1e-4,
        "gradient norm / weight norm of the first layers' weights, as a multiple of that of the last ones",
        "Glorot, Bengio 2010; smallest seen in healthy scripts of the corpus: 2.4e-3 (a recurrent network)",
        ("HLTH702",),
    ),
    Threshold(
        "weight_collapse",
        0.05,
        "a weight's norm as a multiple of its first one",
        "smallest seen in healthy scripts of the corpus: 0.80",
        ("HLTH706",),
    ),
    Threshold(
        "weight_growth",
        20.0,
        "a weight's norm as a multiple of its first one, still growing",
        f"{_CORPUS}: 9.4 (the last layer of a regression on large targets)",
        ("HLTH706",),
    ),
)

_DEFAULTS = {entry.name: entry.value for entry in THRESHOLDS}


def threshold(config: Mapping[str, Any], name: str) -> float:
    """Return a threshold as the run's settings have it."""
    own: Mapping[str, float] = config.get("threshold") or {}
    return float(own.get(name, _DEFAULTS[name]))


def assignments(value: Any) -> dict[str, float]:
    """Read thresholds: a table, texts NAME=VALUE, or one text with commas between them.

    Raises:
        UsageError: there is no threshold of that name.
        ValueError: something is no NAME=VALUE with a finite number.
    """
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        words: Iterable[Any] = value.split(",") if isinstance(value, str) else value
        pairs = [_pair(word) for word in words]
    found = {}
    for name, number in pairs:
        if name not in _DEFAULTS:
            raise UsageError(f"there is no threshold {name!r}; {did_you_mean(str(name), _DEFAULTS)}")
        if isinstance(number, bool) or not abs(float(number)) < float("inf"):
            raise ValueError
        found[str(name)] = float(number)
    return found


def _pair(word: Any) -> tuple[str, str]:
    name, equals, number = str(word).partition("=")
    if not equals:
        raise ValueError
    return name.strip(), number
