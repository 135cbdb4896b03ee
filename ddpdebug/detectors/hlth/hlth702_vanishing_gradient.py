"""HLTH702: gradients vanish with depth."""

from __future__ import annotations

import math
import statistics

from ddpdebug.detectors.hlth.samples import LayerRule, parameters, sampled, sites, weight
from ddpdebug.detectors.kinds import Examples, Fields, Severity, Step, Threshold

#: Rows of an embedding that the batch does not use bring its ratio down.
_NO_PART = ("Embedding", "Norm")


class VanishingGradient(LayerRule):
    """Gradient norms fall by orders of magnitude from the last layers to the first, over a window.

    Impact: early layers hardly train; the model behaves like a shallow one on random features.

    Diagnosis: read the per-layer profile and find where it bends: a steady fall is depth, a step is one module.
    Relate each gradient to its weight's norm before judging. Look at the activations on that stretch: saturation
    (HLTH704), dead units (HLTH703), a tiny output scale. In float16 check whether small gradients underflow to 0.

    Causes:
    - saturating activations (sigmoid, tanh) stacked deep, or in a recurrent model over many steps
    - weights initialised too small, so that the signal dies with depth (HLTH715)
    - no residual connections, or residual branches multiplied by a very small gate
    - underflow in float16 without loss scaling
    - a bottleneck that lets little through: averaging over many positions, a hard mask, a near-detached branch

    Remedy:
    - residual connections with pre-norm; ReLU or GELU instead of sigmoid between layers; gain-aware initialisation
      (`torch.nn.init.kaiming_normal_`, `xavier_uniform_` with `calculate_gain`); gated units with forget bias 1 for
      sequences
    - Adam hides part of the effect; the ratio of update to weight (HLTH705) tells whether it matters
    """

    code = "HLTH702"
    severity = Severity.WARNING
    title = "gradients vanish with depth"
    vanishing = Threshold(
        0.0001,
        "largest gradient norm / weight norm of the first layers over the last layers' median",
        source="Glorot, Bengio 2010; smallest seen in healthy scripts of the corpus: 2.4e-3 (a recurrent network)",
    )
    vanishing_weights = Threshold(
        4, "weights that a profile over the depth needs", source="two or three layers show no decay with depth"
    )
    vanishing_small = Threshold(
        0.1,
        "size of a weight's elements over the median of all weights, below which it is left out",
        source="chosen: a head that began at 0, or with deviations of 2e-5 (MAE), passes on next to nothing at first",
    )
    fires_on = Examples(
        lambda: sampled(8, lambda i: {f"l{k}.weight": weight(grad_norm=10.0 ** (k - 9)) for k in range(8)}),
        lambda: sampled(8, lambda i: {f"l{k}.weight": weight(grad_norm=1e-8 if k < 2 else 0.1) for k in range(6)}),
    )
    silent_on = Examples(
        lambda: sampled(8, lambda i: {f"l{k}.weight": weight(grad_norm=0.5 * 0.5 ** (8 - k)) for k in range(8)}),
        lambda: sampled(
            8, lambda i: {f"l{k}.weight": weight(grad_norm=0.0 if k < 3 else 0.1) for k in range(8)}
        ),  # HLTH714
        lambda: sampled(  # queries and keys of an attention that has learned nothing yet
            8,
            lambda i: {
                f"{k}.{name}": weight(grad_norm=0.1 if name in "vo" or k == 3 else 1e-7)
                for k in range(4)
                for name in "qkvo"
            },
        ),
        lambda: sampled(
            8, lambda i: {f"l{k}.weight": weight(grad_norm=10.0 ** (k - 9 if i == 2 else -2)) for k in range(8)}
        ),
        lambda: sampled(8, lambda i: {f"l{k}.weight": weight(grad_norm=10.0 ** (-6 * k)) for k in range(3)}),  # too few
    )

    def judge(self, step: Step) -> Fields | None:
        table = parameters(step)
        if not table:
            return None
        classes = {path: seen[0].class_name for path, seen in sites(step).items()}
        profile = {
            name: about.grad_norm / about.norm
            for name, about in table.items()
            if about.dim > 1
            and about.norm
            and about.grad_norm
            and not any(word in classes.get(name.rpartition(".")[0], "") for word in _NO_PART)
        }
        sizes = {name: (table[name].norm or 0.0) / math.sqrt(table[name].numel) for name in profile}
        least = self.vanishing_small * statistics.median(sizes.values()) if sizes else 0.0
        profile = {name: value for name, value in profile.items() if sizes[name] >= least}
        if len(profile) < self.vanishing_weights:
            return {}
        names, share = list(profile), max(1, len(profile) // 4)
        tail = statistics.median(profile[name] for name in names[-share:])
        head = max(profile[name] for name in names[:share])  # of one block's weights some get little at any depth
        if head >= self.vanishing * tail:
            return {}
        shown = {name: f"{value:.3g}" for name, value in profile.items()}
        return {names[0]: {"gradient_over_weight": shown, "gradient_of_first_over_last_layer": head / tail}}
