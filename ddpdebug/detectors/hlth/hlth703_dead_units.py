"""HLTH703: units of a ReLU-like activation are zero for nearly all inputs."""

from __future__ import annotations

import math

from ddpdebug.detectors.hlth.samples import LayerRule, activation, least_of, sampled, sites
from ddpdebug.detectors.kinds import Examples, Fields, Severity, Step, Threshold


class DeadUnits(LayerRule):
    """Over the window these units gave 0 for nearly every input, so that no gradient passes through them.

    Impact: the layer has less capacity than its width; fully dead units rarely recover on their own, since their
    incoming weights receive no gradient.

    Diagnosis: look at the share of dead units per layer and at when it rose: from step 0 it is initialisation or
    input scale, suddenly after a step it is one large update. Print mean and std of the pre-activation; a bias far
    below 0 shows. Sparse activation on most inputs, with different units for different inputs, is healthy.

    Causes:
    - `died`: one step that was too large pushed biases far below 0: learning rate, missing warm-up or clipping
    - `dead from the start`: initialisation with negative biases or wrong gain
    - inputs that are not centred or far too large
    - weight decay or a loss term that pushes the pre-activations down

    Remedy:
    - `died`: lower the learning rate or warm it up, clip gradients, normalise before the activation (BatchNorm,
      LayerNorm), or use `nn.LeakyReLU`, `nn.GELU` or `nn.SiLU`
    - `dead from the start`: initialise biases with 0 and weights with `kaiming_normal_`, and centre the inputs
    - units that are dead now need new weights: initialise their rows again, or restart from before the large step
    """

    code = "HLTH703"
    severity = Severity.WARNING
    title = "units of a ReLU-like activation are zero for nearly all inputs"
    dead_inputs = Threshold(
        256,
        "inputs (samples times positions) for which a unit must have been zero",
        source="a unit that fires for 2 % of the inputs is silent for 256 of them in 0.6 % of cases",
    )
    dead_share = Threshold(
        0.6,
        "share of a layer's units that were zero for all inputs",
        source="Amazon SageMaker Debugger's built-in rule DeadRelu: threshold_layer 50 %; largest seen in healthy "
        "scripts of the corpus: 0.46 (deep and narrow)",
    )
    dead_narrow = Threshold(
        0.5,
        "added to `dead_share`, over the root of the number of units, where units were dead from the beginning",
        source="the standard error of a half: inputs with a mean make a unit positive or negative for all of them by "
        "the sign of its weights, and of a narrow layer most are dead by chance",
    )
    fires_on = Examples(
        lambda: sampled(6, modules=lambda i: {"act": activation("relu", zero=0.95, zero_units=0.9)}),
        lambda: sampled(9, modules=lambda i: {"act": activation("relu", zero_units=0.7 if i > 3 else 0.4, units=16)}),
        lambda: sampled(9, modules=lambda i: {"fc2 (input)": activation("relu", zero_units=1.0 if i > 3 else 0.1)}),
    )
    silent_on = Examples(
        lambda: sampled(9, modules=lambda i: {"act": activation("relu", zero=0.9, zero_units=0.3)}),  # sparse, not dead
        lambda: sampled(9, modules=lambda i: {"act": activation("relu", zero_units=0.8, inputs=32)}),  # too few inputs
        lambda: sampled(9, modules=lambda i: {"act": activation("relu", zero_units=0.7, units=16)}),  # too few units
        lambda: sampled(9, modules=lambda i: {"act": activation("relu", zero_units=0.8 if i % 3 == 0 else 0.1)}),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._first: dict[str, float] = {}  # activation -> share of dead units when it was first judged

    def judge(self, step: Step) -> Fields | None:
        found = {}
        seen = sites(step)
        for path, ranks in seen.items():
            least = least_of(ranks, lambda about: about.zero_units)
            inputs = sum(about.inputs or 0 for about in ranks)
            about = ranks[0]
            if least is None or inputs < self.dead_inputs:
                continue
            died = self._first.setdefault(path, least) < self.dead_share
            chance = self.dead_narrow / math.sqrt(about.units) if about.units and not died else 0.0
            if least >= self.dead_share + chance:
                when = "died in training" if died else "dead from the start"
                found[path] = {
                    "dead_units": least,
                    "since": when,
                    "inputs": inputs,
                    "zeros": about.zero,
                    "mean": about.mean,
                }
        return found if seen else None
