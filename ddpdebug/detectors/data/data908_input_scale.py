"""DATA908: inputs are far from normalised, or differently on different ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Findings, Severity, Threshold
from ddpdebug.schema.announcements import EvaluationInputs, InputStatistics

_USUAL = {"layer": "Conv2d", "mean": 0.0, "std": 1.0, "min": -3.0, "max": 3.0, "from_bytes": None, "step": 4}
_DIVIDED = {**_USUAL, "std": 0.001, "min": 0.0, "max": 1.01 / 255, "from_bytes": 0.01}
_DIFFERS = "differs between ranks"
_FAR, _APART = "inputs are far from normalised", "inputs are scaled differently on different ranks"
_LATER: Fields = {
    "title": "inputs are scaled differently than at the beginning of the run",
    "phase": "later",
    "causes": (
        "a transform works in place on a data set that is held in memory: each epoch it changes what the last one left",
        "intended: other data, or a noise that grows",
    ),
    "actions": ("work on a copy (`x = x.clone()`), or use operations that make a new tensor",),
}


def _inputs(**more: Any) -> tuple[Facts]:
    return (Facts(topic="inputs:0", values={0: {**_USUAL, **more}, 1: _USUAL}),)


def _divided(**more: Any) -> tuple[Facts]:
    told = {**_DIVIDED, **more}
    return (Facts(topic="inputs:0", values={0: told, 1: told}),)


def _evaluated(**more: Any) -> tuple[Facts]:
    fact = {"step": 30, "layer": "Linear", "mean": 0.1, "std": 1.0, "trained_mean": 0.0, "trained_std": 1.0, **more}
    return (Facts(topic="evaluated:0", values={0: fact, 1: fact}),)


class InputScale(Detector):
    """The input of the first layer with weights is constant, huge, tiny, or differs strongly between ranks.

    Or between training and evaluation, in forwards of the wrapper, or between the beginning of training and later.

    Impact: training is slow or unstable, first layers saturate, and a pretrained model gets inputs that it has
    never seen; ranks that preprocess differently pull against each other.

    Diagnosis: print min, max, mean and std per channel of one batch on each rank, after all transforms. Typical
    signs: 0 to 255 is not scaled; a maximum near 0.004 is divided by 255 twice; std near 0 is a constant input; a
    mean near -2 with a tiny std is an image scaled twice and then standardised. Compare with the statistics that
    the pretrained model expects.

    Causes:
    - `differs between ranks`: statistics computed per rank from its own shard, or a preprocessing file that a rank
      lacks
    - a missing, doubled or wrongly ordered normalisation (divided by 255 twice, standardised before scaling)
    - statistics of another data set
    - a transform that only the training set, or only the validation set has
    - raw physical units or unbounded features given directly
    - decoding failures that yield constant images or silence
    - another library version on some nodes

    Remedy:
    - normalise in one place, with fixed statistics from the training split that all ranks load from the same file
    - check one decoded batch by eye
    - for heavy-tailed features use log or quantiles
    - for a pretrained model use the transform that belongs to its weights
    """

    code = "DATA908"
    severity = Severity.WARNING
    title = "inputs are far from normalised, or differently on different ranks"
    topics = ("inputs", "evaluated")
    input_mean_apart = Threshold(
        5,
        "difference of input means, in standard deviations, between ranks or with evaluation",
        source="means of the same data over four forwards differ by less than one",
    )
    input_scale_apart = Threshold(
        8,
        "largest standard deviation of inputs over the smallest, between ranks or with evaluation",
        source="shards of one data set differ by far less than a forgotten division by 255",
    )
    input_std = Threshold(
        20,
        "standard deviation of the inputs, above which they are far from normalised",
        source="standardised inputs have 1; bytes of images have about 60",
    )
    input_bytes_highest = Threshold(
        1.01 / 255,
        "largest input, above which nothing was divided by 255 twice",
        source="a byte is at most 255, which leaves 1/255; a hundredth more for rounding",
    )
    input_bytes_rest = Threshold(
        0.02,
        "distance from whole numbers of inputs times 255 twice, above which they were no bytes",
        source="rounding in 32 bits leaves less than 1e-4; of other numbers some are 0.5 away",
    )
    fires_on = Examples(
        lambda: _evaluated(mean=127.0, std=74.0),
        lambda: _evaluated(mean=5.1),
        lambda: _evaluated(std=0.1, forwards=32),
        lambda: _inputs(mean=110.0, std=62.0, max=255.0),
        lambda: Facts(topic="inputs:0", values={0: {**_USUAL, "std": 20.1}}),
        lambda: _inputs(std=0.0, min=0.0, max=0.0),
        _divided,
        lambda: _divided(from_bytes=0.0),
        lambda: Facts(topic="inputs:0", values={0: _USUAL, 1: {**_USUAL, "std": 25.0, "min": -70.0, "max": 75.0}}),
    )
    silent_on = Examples(
        lambda: _evaluated(mean=4.9, std=7.9),
        lambda: _evaluated(std=7.9, trained_std=0.0),
        lambda: steps(3),
        lambda: _inputs(mean=0.2, std=1.3),
        lambda: _inputs(mean=0.13, std=0.3, min=0.0, max=1.0),
        lambda: Facts(topic="inputs:0", values={0: {**_USUAL, "std": 20.0}}),
        lambda: _inputs(std=7.9),
        lambda: _divided(from_bytes=0.03),
        lambda: _divided(max=1.02 / 255),
        lambda: _divided(min=-0.001),
        lambda: _divided(from_bytes=None),  # also where an older version has not said it
    )

    def compare(self, topic: str, facts: Mapping[int, InputStatistics | EvaluationInputs]) -> Findings:
        yield from self._evaluated({r: fact for r, fact in sorted(facts.items()) if isinstance(fact, EvaluationInputs)})
        told = {r: fact for r, fact in sorted(facts.items()) if isinstance(fact, InputStatistics)}
        found: dict[str, list[int]] = {}
        for rank, fact in told.items():
            if (what := self._unusual(fact)) is not None:
                found.setdefault(what, []).append(rank)
        if not found and self._apart([(fact.mean, fact.std) for fact in told.values()]):
            found[_DIFFERS] = list(told)
        for what, ranks in found.items():
            shown = ("mean", "std", "min", "max")
            about = {str(rank): {key: getattr(fact, key) for key in shown} for rank, fact in told.items()}
            layer = told[ranks[0]].layer
            yield self.finding(
                step=0,
                last_step=told[ranks[0]].step,
                ranks=tuple(ranks),
                title=_APART if what == _DIFFERS else _FAR,
                subject=(f"input of the first {layer}",),
                phase=what,
                evidence={"observed": what, "inputs": about},
            )

    def _evaluated(self, told: Mapping[int, EvaluationInputs]) -> Findings:
        ranks = [r for r, f in told.items() if self._apart([(f.mean, f.std), (f.trained_mean, f.trained_std)])]
        if ranks:
            fact = told[ranks[0]]
            evidence = {
                "later" if fact.forwards else "evaluation": {"mean": fact.mean, "std": fact.std},
                "training": {"mean": fact.trained_mean, "std": fact.trained_std},
            }
            if fact.forwards:
                about = {"subject": (f"input of the first {fact.layer}",), "evidence": evidence}
                yield self.finding(step=fact.step, ranks=tuple(ranks), **_LATER, **about)
                return
            yield self.finding(
                title="evaluation inputs are scaled differently than training inputs",
                step=fact.step,
                ranks=tuple(ranks),
                subject=(f"input of the first {fact.layer}",),
                phase="evaluation",
                evidence=evidence,
            )

    def _apart(self, inputs: Sequence[tuple[float, float]]) -> bool:
        """Whether inputs of these means and standard deviations cannot come from the same preparation."""
        means, stds = [mean for mean, _ in inputs], [std for _, std in inputs]
        if len(stds) < 2 or min(stds) <= 0:
            return False
        if max(stds) > self.input_scale_apart * min(stds):
            return True
        return max(means) - min(means) > self.input_mean_apart * max(stds)

    def _unusual(self, fact: InputStatistics) -> str | None:
        """What is wrong with the inputs of one rank, None where nothing is."""
        if fact.min == fact.max:
            return "constant"
        bytes_again = fact.from_bytes is not None and fact.from_bytes < self.input_bytes_rest
        if bytes_again and fact.min >= 0 and fact.max <= self.input_bytes_highest:
            return "divided by 255 twice"
        return "far from normalised" if fact.std > self.input_std else None
