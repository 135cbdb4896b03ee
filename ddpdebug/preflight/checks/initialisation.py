"""Point 4, initialisation: activations by depth, dead and saturated units, symmetric weights, scale of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ddpdebug.preflight.checks.layers import WEIGHTED, Pass, sampled
from ddpdebug.preflight.examine import each
from ddpdebug.preflight.output.results import Check, Plot, Series, Status, Table
from ddpdebug.preflight.subject import Subject

_BATCHES = 2
_DEEP = 4
#: The deviation of the activations may change by so much from the first to the last hidden layer. Torch's default for
#: Linear shrinks it by 0.41 for each ReLU layer (variance 1/3 of 1/fan_in, half of it cut off): 0.001 after 8 layers.
_CHANGE = 1e3
#: Share of a layer's units, as in SageMaker Debugger's DeadRelu and SaturatedActivation rules (threshold_layer 50).
_UNITS = 0.5
#: How far beyond Xavier's, He's, torch's and 0.02 a weight's deviation is no scheme that people use.
_FACTOR = 10.0
_ENOUGH = 64
_NAMED = 4


def check(subject: Subject) -> list[Check]:
    """Check the initial weights, and a pass of each of the first batches."""
    passes = sampled(subject, _BATCHES)
    return each(
        activations_by_depth=lambda: [_depth(passes[0])],
        dead_units=lambda: _dead(passes),
        saturated_units=lambda: _saturated(passes),
        symmetric_weights=lambda: [_symmetric(subject)],
        scale_of_the_weights=lambda: [_scale(subject)],
    )


def _depth(first: Pass) -> Check:
    layers = [layer for layer in first.layers if layer.spread > 0]
    plot = Plot(
        title="activations by depth",
        x_label="layer",
        y_label="standard deviation",
        series=(Series(name="output", x=tuple(range(len(layers))), y=tuple(layer.spread for layer in layers)),),
        log_y=True,
    )
    inner = layers[:-1]
    if len(inner) < _DEEP:
        return Check(Status.INFO, f"{len(layers)} layers are too few for a trend by depth", plots=(plot,))
    change = inner[-1].spread / inner[0].spread
    bad = not 1 / _CHANGE < change < _CHANGE
    return Check(
        Status.WARN if bad else Status.PASS,
        f"from {inner[0].name} to {inner[-1].name}, {len(inner)} layers, the deviation goes from "
        f"{inner[0].spread:.3g} to {inner[-1].spread:.3g}",
        code="HLTH715",
        evidence={layer.name: layer.spread for layer in layers},
        hypotheses=()
        if not bad
        else ("weights too small for the depth", "no normalisation and no residual connections")
        if change < 1
        else ("weights too large for the depth", "a sum over many inputs without division"),
        actions=("`torch.nn.init.kaiming_normal_(w, nonlinearity='relu')`, or a norm in every block",),
        plots=(plot,),
    )


def _dead(passes: list[Pass]) -> Iterator[Check]:
    shares: dict[str, float] = {}
    for name, units in passes[0].dead.items():
        for other in passes[1:]:
            if name in other.dead and other.dead[name].shape == units.shape:
                units = units & other.dead[name]  # noqa: PLW2901 - dead in all batches
        shares[name] = float(units.double().mean()) if units.numel() else 0.0
    yield from _shares(shares, "dead units", "HLTH703", "are 0 for every sample", ("biases far below 0", "huge inputs"))


def _saturated(passes: list[Pass]) -> Iterator[Check]:
    shares = {name: min(p.saturated.get(name, 1.0) for p in passes) for name in passes[0].saturated}
    causes = ("weights too large for a sigmoid or tanh", "inputs that are not normalised")
    yield from _shares(shares, "saturated units", "HLTH704", "pass on no gradient", causes)


def _shares(shares: dict[str, float], name: str, code: str, words: str, causes: tuple[str, ...]) -> Iterator[Check]:
    if not shares:
        return
    worst = max(shares, key=lambda key: shares[key])
    bad, most = shares[worst] > _UNITS, f" (the most of {len(shares)} layers)" if len(shares) > 1 else ""
    yield Check(
        Status.WARN if bad else Status.PASS,
        f"{100 * shares[worst]:.0f} % of the units of {worst} {words}{most}",
        name=name,
        code=code,
        evidence={key: round(share, 4) for key, share in shares.items()},
        hypotheses=causes,
    )


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, WEIGHTED) and isinstance(weight, Tensor) and weight.requires_grad:
            yield name, module, weight.detach()


def _symmetric(subject: Subject) -> Check:
    """Judge the symmetry of weights: units that start as copies; zeros are how the end of a residual branch starts."""
    same = []
    for name, module, weight in _weights(subject.model):
        rows = weight.flatten(1)
        groups = getattr(module, "groups", 1)
        if len(rows) > 1 and groups == 1 and bool(rows.any()) and torch.equal(rows, rows[:1].expand_as(rows)):
            same.append(name)
    return Check(
        Status.WARN if same else Status.PASS,
        f"all units of {', '.join(same[:_NAMED])} start with the same weights and stay copies of each other"
        if same
        else "the units of each layer start with different weights",
        code="HLTH715",
        hypotheses=("`nn.init.constant_` or `ones_` on a weight",),
        actions=("draw the weights at random; constants are for biases and norms",),
    )


def _scale(subject: Subject) -> Check:
    rows, odd = [], []
    for name, _, weight in _weights(subject.model):
        fan_in = weight[0].numel()
        std = float(weight.double().std()) if weight.numel() > 1 else 0.0
        known = {
            "He": math.sqrt(2 / fan_in),
            "Xavier": math.sqrt(2 / (fan_in + weight.shape[0])),
            "torch's default": math.sqrt(1 / (3 * fan_in)),
            "0.02": 0.02,
        }
        nearest = min(known, key=lambda key: abs(math.log(max(std, 1e-12) / known[key])))
        rows.append((name, std, known["He"], known["Xavier"], known["torch's default"], nearest if std else "zeros"))
        within = min(known.values()) / _FACTOR < std < max(known.values()) * _FACTOR
        if std > 0 and not within and weight.numel() >= _ENOUGH:
            odd.append(f"{name} ({std:.3g} against {known['He']:.3g} by He)")
    loaded = bool(subject.facts.get("loaded"))
    bad = bool(odd) and not loaded
    head = ("layer", "deviation", "He", "Xavier", "torch's default", "nearest")
    return Check(
        Status.WARN if bad else Status.INFO if odd else Status.PASS,
        f"far from every usual initialisation: {', '.join(odd[:_NAMED])}"
        if odd
        else f"the deviations of {len(rows)} weights are those of usual initialisations",
        code="HLTH715" if bad else "",
        actions=("`torch.nn.init.kaiming_normal_` for ReLU, `xavier_uniform_` for tanh, 0.02 for transformers",)
        if bad
        else (),
        tables=(Table(head=head, rows=tuple(rows)),) if rows else (),
    )
