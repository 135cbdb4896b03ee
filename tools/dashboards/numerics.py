"""Numerics and training health: what was not finite, which rank made it, and what the scaler and the clipping do."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import FINITE, SEVERITIES, Board, lines, linked, listing, states, worded


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-numerics",
        "Numerics and training health",
        "Where the first NaN was, and the signs before it: norms that grow, a scale that falls, clipping that never "
        "stops.",
    )
    bad = f"max by (what) ({q.rate('ddpdebug_nonfinite_steps_total')})"
    alive = f"max({q.chosen('ddpdebug_step')})"
    made.add(
        states([(f"({bad} > bool 0) and on () {alive}", "{{what}}")], words=FINITE, missing="no data"),
        "What was not finite",
        "Loss, the ranks' own gradients, or the reduced ones. Own gradients first: a batch or an overflow on one "
        "rank. After the reduction every rank has it, whoever made it.",
    )
    made.add(
        _makers(),
        "Who made the first NaN",
        "The findings about NaN and infinity in the time range, also of a run that has ended, the first one on top: "
        "the ranks that made it, the module or weight, the step. Afterwards every rank has it.",
    )
    _signs(made)
    _health(made)
    return made


def _makers() -> dict[str, object]:
    labels = "culprits, subject, code, severity, location, incident"
    found = q.last(q.chosen("run_incident:ddpdebug_incident_step:max", 'code=~"NUM.*"'))
    columns = {
        "Value": "Step",
        "culprits": "Ranks",
        "subject": "What",
        "location": "Where",
        "code": "Code",
        "severity": "Severity",
    }
    panel = listing(
        [f"max by ({labels}) ({found})"],
        names=columns,
        units={"Step": "none"},
        sort="Step",
        missing="none",
        rising=True,
        hidden=("incident",),
    )
    return linked(worded(panel, "Severity", SEVERITIES), "see the ranks", "ddpdebug-ranks")


def _signs(made: Board) -> None:
    made.row("Signs before")
    norm = q.of_run("run:ddpdebug_grad_norm:max")
    made.add(
        lines([(norm, "norm"), (q.of_run("ddpdebug_clip_threshold"), "clipped to")]),
        "Gradient norm and clipping",
        "The norm is without the loss scale. One that stays far above the threshold: every step is clipped, and the "
        "learning rate is in effect much smaller than set. One that grows for many steps: divergence.",
    )
    clipped, skipped, steps = (
        f"max({q.rate(f'ddpdebug_{which}_total')})" for which in ("clipped_steps", "skipped_steps", "steps")
    )
    made.add(
        lines([(f"{clipped} / ({steps} > 0)", "share of steps")], unit="percentunit", share=True),
        "Clipped steps",
        "Share of the steps that clipping changed. Near 100 % for long: raise the threshold, or look for the cause "
        "of the large gradients.",
    )
    made.add(
        lines([(q.of_run("ddpdebug_loss_scale"), "scale")], missing="no gradient scaler in this run"),
        "Loss scale",
        "Scale of the gradient scaler. Falling without recovery: gradients overflow in every step, and no step is "
        "taken any more.",
    )
    made.add(
        lines([(f"{skipped} / ({steps} > 0)", "share of steps")], unit="percentunit", share=True),
        "Skipped steps",
        "Share of the steps that the scaler did not take because gradients were not finite. A few percent is "
        "normal, a growing share is not.",
    )


def _health(made: Board) -> None:
    made.row("Training health")
    made.add(
        lines(q.spread("ddpdebug_loss"), zero=False),
        "Loss by rank",
        "The highest, median and lowest rank. A spread that widens: ranks that no longer learn the same (Rank "
        "agreement), or shards of different difficulty.",
    )
    made.add(
        lines([(q.of_run("ddpdebug_learning_rate"), "learning rate")]),
        "Schedule",
        "Learning rate of the first parameter group. Compare with where the loss turns.",
    )
    made.add(
        lines(
            [(q.of_run("ddpdebug_val_loss"), "validation loss")],
            missing="monitor.observe(val_loss=...) tells it",
            zero=False,
        ),
        "Validation loss",
        "As the script told it. Rising while the loss falls: the model learns its data by heart (HLTH712).",
    )
    ratio = f"{q.of_run('ddpdebug_update_norm')} / {q.of_run('ddpdebug_param_norm')}"
    made.add(
        lines([(ratio, "all weights"), (_layers("ddpdebug_layer_update_ratio"), "{{layer}}")]),
        "Update over weight",
        "Norm of a sampled step's change over the norm of the weights: of all, and of the two layers that change most. "
        "Around 1e-3 is usual; far above it the model forgets, far below it hardly trains (HLTH705).",
    )
    made.add(
        lines([(_layers("ddpdebug_layer_grad_norm"), "{{layer}}")], missing="no layer was sampled"),
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
            share=True,
        ),
        "Dead and saturated units",
        "Share of the units that no input made fire, and of the values at the end of their range: the two worst "
        "activations. Near 100 %: that layer no longer learns (HLTH703, HLTH704).",
    )
    made.add(
        lines([(q.of_run("ddpdebug_parameters_without_gradient"), "parameters")], count=True),
        "Parameters without a gradient",
        "Trainable parameters that got no gradient in the last step: a dead branch, or a head that this batch does "
        "not use. Constant above zero: find_unused_parameters, or freeze them.",
    )
    made.add(
        lines(
            [
                (
                    f"max({q.by_rank('ddpdebug_local_grad_norm')}) / max({q.by_rank('ddpdebug_grad_norm')})",
                    "own / reduced",
                )
            ]
        ),
        "Gradient noise",
        "Largest norm of a rank's own gradients over the norm of their mean. Near the square root of the number of "
        "ranks: mostly noise, a larger batch would help. Near 1: all ranks say the same.",
    )


def _layers(name: str) -> str:
    return f"max by (layer) ({q.chosen(name)})"
