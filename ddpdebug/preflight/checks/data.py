"""Point 1, the data: inputs, labels, duplicates and splits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.checks import duplicates, label_relation, labels, splits
from ddpdebug.preflight.examine import each
from ddpdebug.preflight.observe import Seen, floating, moments, observe, observe_all
from ddpdebug.preflight.output.results import Check, Status, Table
from ddpdebug.preflight.sandbox.trials import looking
from ddpdebug.preflight.subject import Subject
from ddpdebug.probes.ranges import dtype_name

#: Beyond these an input is "far from normalised": raw pixels (0 to 255) have a mean near 120 and a deviation near 60,
#: standardised features 0 and 1. Between them lies what trains well enough.
_HUGE = 30.0
_TINY = 1e-3
#: Pixels that were divided by 255 twice lie below 1/255.
_TWICE = 1 / 255
#: What normalises by itself, or takes indices.
_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.InstanceNorm1d,
    nn.Embedding,
    nn.EmbeddingBag,
)


def check(subject: Subject) -> list[Check]:
    """Check the recorded batches."""
    seen = observe_all(subject)
    return each(
        inputs=lambda: _inputs(seen),
        labels=lambda: labels.check(seen),
        duplicates=lambda: duplicates.check(subject, seen),
        normalisation=lambda: _scale(subject),
        train_and_validation=lambda: splits.check(subject),
        labels_and_inputs=lambda: label_relation.check(subject, seen),
    )


def _inputs(seen: list[Seen]) -> Iterator[Check]:
    rows, bad = [], 0
    for number, tensor in enumerate(seen[0].inputs):
        own = [s.inputs[number] for s in seen if number < len(s.inputs)]
        rows.append(_row(number, tensor, own))
        bad += sum(int((~torch.isfinite(t) & ~torch.isneginf(t)).sum()) for t in floating(own))
    table = Table(head=("input", "shape", "dtype", "min", "max", "mean", "std", "not finite"), rows=tuple(rows))
    broken = any(s.loss is not None and not bool(torch.isfinite(s.loss).all()) for s in seen)
    if bad and broken:
        yield Check(
            Status.FAIL,
            f"{bad} values of the inputs are not finite, and so is the loss",
            code="NUM305",
            hypotheses=("missing values in the data", "a division by a standard deviation of 0 in the preprocessing"),
            actions=("find the samples with `~torch.isfinite(x)` and repair or leave them out",),
            tables=(table,),
        )
        return
    note = f"; {bad} values are not finite, which the loss survives" if bad else ""
    status = Status.INFO if bad or not rows else Status.PASS
    go = "1 tensor goes" if len(rows) == 1 else f"{len(rows)} tensors go"
    yield Check(status, f"{go} into the model in {len(seen)} batches{note}", tables=(table,))


def _row(number: int, tensor: Tensor, own: list[Tensor]) -> tuple[object, ...]:
    kind = dtype_name(tensor)
    values = torch.cat([t.detach().flatten().double() for t in own]) if not tensor.is_complex() else torch.empty(0)
    finite = values[torch.isfinite(values)]
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    if not finite.numel():
        return (number, shape, kind, "", "", "", "", values.numel())
    return (
        number,
        shape,
        kind,
        float(finite.min()),
        float(finite.max()),
        *moments(finite),
        values.numel() - finite.numel(),
    )


def _scale(subject: Subject) -> Iterator[Check]:
    """Judge what the first layer with weights gets: a model may normalise by itself."""
    first = _first_layer_input(subject)
    problem = None if first is None else _off_scale(*first)
    if first is None:
        yield Check(Status.SKIPPED, "the first layer takes no numbers with fractions, or normalises them itself")
    elif problem is None:
        mean, std = moments(first[1])
        yield Check(
            Status.PASS, f"module `{first[0]}` gets inputs with mean {mean:.3g} and standard deviation {std:.3g}"
        )
    else:
        yield Check(
            Status.WARN,
            problem,
            code="DATA908",
            hypotheses=("the scaling step is missing from the transform, or there twice", "a padded or empty column"),
            actions=("scale each feature to mean 0 and deviation 1 with the statistics of the training set",),
        )
    yield from _between_ranks(subject)


def _off_scale(name: str, values: Tensor) -> str | None:
    mean, std = moments(values)
    what = f"the first layer (module `{name}`) gets inputs with mean {mean:.4g} and standard deviation {std:.4g}"
    low, high = float(values.min()), float(values.max())
    if std == 0 and values.numel() > 1:
        return f"{what}: the input is constant"
    if low >= 0 and 0 < high <= _TWICE and values.dim() == 4:
        return f"{what}: no more than {high:.2g}, as pixels that were divided by 255 twice"
    if max(abs(mean), std) > _HUGE:
        return f"{what}, far above the 0 and 1 of normalised data"
    return f"{what}, far below the 0 and 1 of normalised data" if max(abs(mean), std) < _TINY else None


def _between_ranks(subject: Subject) -> Iterator[Check]:
    scales = {rank: r["scale"] for rank, r in subject.facts.get("ranks", {}).items() if r and r.get("scale")}
    if len(scales) < 2:
        return
    means, stds = [s[0] for s in scales.values()], [s[1] for s in scales.values()]
    # random shards of one data set agree to some percent; what is a whole deviation apart is scaled otherwise
    differ = max(means) - min(means) > max(stds) or max(stds) > 3 * max(min(stds), 1e-12)
    yield Check(
        Status.WARN if differ else Status.PASS,
        "; ".join(f"rank {rank}: mean {m:.3g}, deviation {s:.3g}" for rank, (m, s) in sorted(scales.items())),
        name="normalisation on the ranks",
        code="DATA908",
        evidence={"scales": {str(rank): s for rank, s in scales.items()}},
        actions=("preprocess with the same statistics on all ranks",),
    )


def _first_layer_input(subject: Subject) -> tuple[str, Tensor] | None:
    """Return name and input of the first layer with weights; None where it normalises or takes indices."""
    model = copied(subject.model)
    found: list[tuple[str, nn.Module, Tensor | None]] = []

    def note(name: str, module: nn.Module, args: tuple[object, ...], _: object) -> None:
        value = args[0] if args and isinstance(args[0], Tensor) and args[0].is_floating_point() else None
        if not found:
            found.append((name, module, None if value is None else value.detach().double()))

    named = model.named_modules()
    weighted = {name: module for name, module in named if next(module.parameters(recurse=False), None) is not None}
    with torch.no_grad(), looking(weighted, before=note):
        observe(subject, subject.batches[0], model)
    if not found or isinstance(found[0][1], _NORMS) or found[0][2] is None or not found[0][2].numel():
        return None
    values = found[0][2]
    finite = values[torch.isfinite(values)] if not bool(torch.isfinite(values).all()) else values
    return (found[0][0] or "the model", finite) if finite.numel() else None
