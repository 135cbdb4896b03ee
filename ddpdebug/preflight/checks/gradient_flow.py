"""Point 5, gradient flow: gradients by depth, train mode, and outputs that depend on the wrong inputs."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from torch import nn

from ddpdebug.preflight.checks import leakage
from ddpdebug.preflight.checks.layers import Layer, sampled
from ddpdebug.preflight.examine import each
from ddpdebug.preflight.output.results import Check, Plot, Series, Status
from ddpdebug.preflight.subject import Subject

_DEEP = 6
#: Between the first and the last third of the layers the gradients may differ by so much. Adam evens out factors of
#: hundreds; at 1e4 the front of an SGD run stands still, and beyond 1e7 float32 sums lose it altogether.
_RATIO = 1e4
_MODAL = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.BatchNorm1d, nn.BatchNorm2d)


def check(subject: Subject) -> list[Check]:
    """Check the gradients of one backward pass, modules' modes, and leakage between samples and positions."""
    subject.recorded(1)
    return each(
        gradients_by_depth=lambda: _depth(sampled(subject, 1)[0].layers),
        train_mode=lambda: _modes(subject),
        eval_mode_repeats=lambda: leakage.check(subject),
    )


def _depth(found: list[Layer]) -> Iterator[Check]:
    layers = [layer for layer in found if layer.gradient > 0]
    plot = Plot(
        title="gradients by depth",
        x_label="layer",
        y_label="standard deviation of the gradient at its output",
        series=(Series(name="gradient", x=tuple(range(len(layers))), y=tuple(layer.gradient for layer in layers)),),
        log_y=True,
    )
    if len(layers) < _DEEP:
        yield Check(Status.INFO, f"{len(layers)} layers with gradients are too few for a trend by depth", plots=(plot,))
        return
    third = len(layers) // 3
    front = median(layer.gradient for layer in layers[:third])
    back = median(layer.gradient for layer in layers[-third:])
    vanish, explode = front * _RATIO < back, front > back * _RATIO
    yield Check(
        Status.WARN if vanish or explode else Status.PASS,
        f"over {len(layers)} layers the gradient goes from {back:.3g} in the last third to {front:.3g} in the first",
        code="HLTH702" if vanish else "HLTH701" if explode else "",
        evidence={layer.name: layer.gradient for layer in layers},
        hypotheses=("sigmoid or tanh between many layers", "weights too small for the depth")
        if vanish
        else ("weights too large for the depth", "no normalisation in a recurrent or residual stack")
        if explode
        else (),
        actions=("add residual connections with norms, or initialise for the activation used",),
        plots=(plot,),
    )


def _modes(subject: Subject) -> Iterator[Check]:
    model = subject.model
    parts = [model] if not isinstance(model, nn.ModuleList) else list(model)
    wrong = [
        part
        for part in parts
        if not part.training
        and any(isinstance(m, _MODAL) for m in part.modules())
        and any(p.requires_grad for p in part.parameters())
    ]
    if wrong:
        of_a_step = "steps" in subject.facts  # what was given from Python may be put in train mode later
        yield Check(
            Status.FAIL if of_a_step else Status.WARN,
            f"the training forward of {type(wrong[0]).__name__} runs in eval mode: dropout is off, and norms "
            "use statistics that nobody updates",
            code="RCP804",
            hypotheses=("`model.eval()` in an evaluation before training, without `model.train()` after it",),
            actions=("call `model.train()` at the start of each epoch",),
        )
    place = subject.facts.get("evaluated_in_train_mode")
    if place and any(isinstance(m, _MODAL) for m in model.modules()):
        yield Check(
            Status.WARN,
            f"a forward without gradients at {place} runs in train mode",
            name="evaluation mode",
            code="RCP805",
            actions=("call `model.eval()` before it and `model.train()` after it; no_grad does not change the mode",),
        )
