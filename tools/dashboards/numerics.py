"""Numerics and training health: what was not finite, on which rank first, and what the scaler and the clipping do."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import BAD, GOOD, Board, lines, linked, states

_FINITE = ((0, "finite", GOOD), (1, "NaN or Inf", BAD))


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-numerics",
        "Numerics and training health",
        "Where the first NaN was, and the signs before it: norms that grow, a scale that falls, clipping that never "
        "stops.",
    )
    bad = q.increase("ddpdebug_nonfinite_steps_total", "$__rate_interval", "what")
    made.add(
        states([(f"{bad} > bool 0", "{{what}}")], words=_FINITE, missing="no data"),
        "What was not finite",
        "Loss, the ranks' own gradients, or the reduced ones. Own gradients first: a batch or an overflow on one "
        "rank. After the reduction every rank has it, whoever made it.",
    )
    local = f'ddpdebug_nonfinite_steps_total{{what="local_gradients", {q.RANKS}}}'
    panel = lines(
        [(q.worst(8, q.increase(local, "$__rate_interval", "rank")), "rank {{rank}}")],
        missing="no rank had non-finite gradients of its own",
    )
    made.add(
        linked(panel, "this rank", "ddpdebug-ranks", "rank"),
        "Ranks that made it",
        "Steps in which the rank's own gradients, before the reduction, were not finite: the eight worst ranks. One "
        "rank alone: its data or its hardware.",
    )
    _signs(made)
    _health(made)
    return made


def _signs(made: Board) -> None:
    made.row("Signs before")
    norm = q.ranks("ddpdebug_grad_norm")
    made.add(
        lines([(f"max({norm})", "norm"), (q.shared("ddpdebug_clip_threshold"), "clipped to")]),
        "Gradient norm and clipping",
        "A norm that stays far above the threshold: every step is clipped, and the learning rate is in effect much "
        "smaller than set. A norm that grows for many steps: divergence.",
    )
    clipped = q.chosen("rate(ddpdebug_clipped_steps_total[$__rate_interval])")
    steps = q.chosen("rate(ddpdebug_steps_total[$__rate_interval])")
    made.add(
        lines([(f"max({clipped}) / max({steps})", "share of steps")], unit="percentunit"),
        "Clipped steps",
        "Share of the steps that clipping changed. Near 100 % for long: raise the threshold, or look for the cause "
        "of the large gradients.",
    )
    made.add(
        lines([(q.shared("ddpdebug_loss_scale"), "scale")], missing="no gradient scaler in this run"),
        "Loss scale",
        "Scale of the gradient scaler. Falling without recovery: gradients overflow in every step, and no step is "
        "taken any more.",
    )
    skipped = q.chosen("rate(ddpdebug_skipped_steps_total[$__rate_interval])")
    made.add(
        lines([(f"max({skipped}) / max({steps})", "share of steps")], unit="percentunit"),
        "Skipped steps",
        "Share of the steps that the scaler did not take because gradients were not finite. A few percent is "
        "normal, a growing share is not.",
    )


def _health(made: Board) -> None:
    norm = q.ranks("ddpdebug_grad_norm")
    made.row("Training health")
    loss = q.ranks("ddpdebug_loss")
    made.add(
        lines(q.spread(loss), zero=False),
        "Loss by rank",
        "The highest, median and lowest rank. A spread that widens: ranks that no longer learn the same (Rank "
        "agreement), or shards of different difficulty.",
    )
    made.add(
        lines([(q.shared("ddpdebug_learning_rate"), "learning rate")]),
        "Schedule",
        "Learning rate of the first parameter group. Compare with where the loss turns.",
    )
    made.add(
        lines(
            [(q.shared("ddpdebug_val_loss"), "validation loss")],
            missing="monitor.observe(val_loss=...) tells it",
            zero=False,
        ),
        "Validation loss",
        "As the script told it. Rising while the loss falls: the model learns its data by heart (HLTH712).",
    )
    ratio = f"{q.shared('ddpdebug_update_norm')} / {q.shared('ddpdebug_param_norm')}"
    made.add(
        lines([(ratio, "all weights"), (_layers("ddpdebug_layer_update_ratio"), "{{layer}}")]),
        "Update over weight",
        "Norm of a sampled step's change over the norm of the weights: of all, and of the two layers that change most. "
        "Around 1e-3 is usual; far above it the model forgets, far below it hardly trains (HLTH705).",
    )
    made.add(
        lines([(_layers("ddpdebug_layer_grad_norm"), "{{layer}}")]),
        "Layers with the largest gradients",
        "The two largest gradient norms of single weights in the sampled steps. One layer far above the rest: look at "
        "its input and its initialisation (HLTH701, HLTH702).",
    )
    made.add(
        lines(
            [
                (_layers("ddpdebug_layer_dead_units"), "dead: {{layer}}"),
                (_layers("ddpdebug_layer_saturation"), "saturated: {{layer}}"),
            ],
            unit="percentunit",
            missing="no ReLU, sigmoid, tanh or softmax was sampled",
        ),
        "Dead and saturated units",
        "Share of the units that no input made fire, and of the values at the end of their range: the two worst "
        "activations. Near 100 %: that layer no longer learns (HLTH703, HLTH704).",
    )
    made.add(
        lines([(q.shared("ddpdebug_parameters_without_gradient"), "parameters")]),
        "Parameters without a gradient",
        "Trainable parameters that got no gradient in the last step: a dead branch, or a head that this batch does "
        "not use. Constant above zero: find_unused_parameters, or freeze them.",
    )
    local_norm = q.ranks("ddpdebug_local_grad_norm")
    made.add(
        lines([(f"max({local_norm}) / max({norm})", "own / reduced")]),
        "Gradient noise",
        "Largest norm of a rank's own gradients over the norm of their mean. Near the square root of the number of "
        "ranks: mostly noise, a larger batch would help. Near 1: all ranks say the same.",
    )


def _layers(name: str) -> str:
    return q.shared(name, "layer")
