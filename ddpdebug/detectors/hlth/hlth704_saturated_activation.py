"""HLTH704: activations are saturated."""

from __future__ import annotations

from ddpdebug.detectors.hlth.samples import LayerRule, activation, least_of, sampled, sites
from ddpdebug.detectors.kinds import Examples, Fields, Severity, Step, Threshold
from ddpdebug.schema.row import Flag


def _weights(saturated: float) -> Fields:
    return {**activation("softmax", saturated=saturated), "role": "weights", "mean": None, "std": None}


class SaturatedActivation(LayerRule):
    """Most outputs of this sigmoid, tanh or softmax sit at the ends of their range over a window.

    Of a softmax in a module's own code two things do not count: rows of which a mask leaves one entry, and scores that
    were divided by a number below 1, a low temperature on purpose.

    Impact: the derivative there is close to 0, so that little gradient reaches what lies before it; a saturated
    attention softmax looks at one position only.

    Diagnosis: print mean and std of the pre-activation: beyond about 5 for sigmoid and 3 for tanh little gradient is
    left. For softmax compare the entropy of its rows with log of their length, at the start and now. A confident
    classifier at the end of training is saturated by success; hidden layers are what counts.

    Causes:
    - `softmax`: attention scores without 1/sqrt(d), a temperature that is too low, queries and keys whose norms grow
    - pre-activations too large: inputs not normalised, initial weights too large
    - weights that grew through a high learning rate
    - sigmoid or softmax in the middle of the network where no probability is needed

    Remedy:
    - `softmax`: use `F.scaled_dot_product_attention`, which scales, normalise queries and keys, raise the temperature
    - normalise in front of the activation, use `xavier_uniform_` with `calculate_gain("tanh")`
    - prefer ReLU-like units in hidden layers
    - lower the learning rate of the group whose weights grow
    """

    code = "HLTH704"
    severity = Severity.WARNING
    title = "activations are saturated"
    saturated_share = Threshold(
        0.8,
        "share of outputs at the ends of their range: within 0.01 of sigmoid's and tanh's limits, softmax above 0.99",
        source="Amazon SageMaker Debugger's built-in rule SaturatedActivation: 50 %; largest seen in healthy "
        "scripts of the corpus: 0.20",
    )
    saturated_first = Threshold(
        0.6,
        "share of its rows with an entry above 0.99 as training begins",
        source="a half is what a causal mask over two positions gives",
    )
    saturated_begin = Threshold(
        3,
        "newest step whose sample counts as the first of a module's own softmax",
        source="attention that looks at one position is what some heads have learned, and none begins with",
    )
    fires_on = Examples(
        lambda: sampled(6, modules=lambda i: {"act": activation("sigmoid", saturated=0.95)}),
        lambda: sampled(9, modules=lambda i: {"attention (input)": activation("softmax", saturated=0.99)}),
        lambda: sampled(9, modules=lambda i: {"attention (softmax)": _weights(0.7)}),
    )
    silent_on = Examples(
        lambda: sampled(9, modules=lambda i: {"head": activation("sigmoid", saturated=0.95, hidden=False)}),
        lambda: sampled(9, modules=lambda i: {"act": activation("tanh", saturated=0.5)}),
        lambda: sampled(9, modules=lambda i: {"act": activation("tanh", saturated=0.9 if i < 2 else 0.4)}),
        lambda: sampled(9, modules=lambda i: {"attention (softmax)": _weights(0.1 * i)}),  # it has learned to choose
        lambda: sampled(9, modules=lambda i: {"attention (softmax)": _weights(0.99)}, flags=Flag.LOADED),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._begun: dict[tuple[int, str], bool] = {}  # (optimizer, softmax) -> it was saturated as training began

    def judge(self, step: Step) -> Fields | None:
        seen = sites(step)
        found = {}
        for path, ranks in seen.items():
            least = least_of(ranks, lambda about: about.saturated if about.hidden else None)
            saturated = least is not None and least >= self.saturated_share
            about = ranks[0]
            if about.role == "weights" and least is not None:  # sharp as well where the model has learned to look
                fresh = step.step <= self.saturated_begin and not step.any(Flag.LOADED)
                saturated = least >= self.saturated_first
                saturated &= self._begun.setdefault((step.optimizer, path), saturated and fresh)
            if saturated:
                found[path] = {"kind": about.kind, "share_saturated": least, "mean": about.mean, "std": about.std}
        return found if seen else None
