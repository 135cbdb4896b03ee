"""Training against validation data: shared samples, different statistics, augmentation of validation data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddpdebug.nested import tensors_in_objects
from ddpdebug.preflight.capture.digests import of_inputs
from ddpdebug.preflight.capture.sampling import Samples
from ddpdebug.preflight.observe import moments
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.preflight.subject import Subject

#: Numbers in a sample below which two may be equal by chance.
_ELEMENTS = 16
#: Splits of one data set differ by some percent of a deviation; half of one is another preprocessing.
_MEANS_APART = 0.5
_DEVIATIONS_APART = 2.0
#: Standard errors between two means before chance is out of the question.
_ERRORS = 6.0


def check(subject: Subject) -> Iterator[Check]:
    """Compare raw samples of the data sets; fall back to the samples of batches."""
    samples = subject.samples
    if subject.val_batches and (samples is None or not samples.validation):
        samples = Samples(train=_rows(subject.batches), validation=_rows(subject.val_batches))
    if samples is None or not samples.validation or not samples.train:
        why = None if samples is None else samples.trouble
        summary = f"the data sets could not be read: {why}" if why else "no validation data are known"
        yield Check(Status.SKIPPED, summary)
        return
    yield _overlap(samples)
    yield from _statistics(samples)
    if samples.repeats:
        yield _repeats(samples)


def _rows(batches: Any) -> list[Any]:
    """Return the samples of batches whose tensors count them in their first dimension."""
    rows: list[Any] = []
    for batch in batches:
        parts = [t for t in tensors_in_objects(batch) if t.dim()]
        size = parts[0].shape[0] if parts else 0
        rows += [tuple(t[at] for t in parts if t.shape[0] == size) for at in range(size)]
    return rows


def _input(sample: Any) -> Tensor | None:
    return next((t for t in tensors_in_objects(sample) if t.dim()), None)


def _digest(sample: Any) -> int | None:
    tensor = _input(sample)
    if tensor is None or tensor.numel() < _ELEMENTS or bool((tensor == tensor.flatten()[0]).all()):
        return None
    return int(of_inputs([tensor[None]])["batch"])


def _overlap(samples: Samples) -> Check:
    own = {digest for sample in samples.train if (digest := _digest(sample)) is not None}
    others = [digest for sample in samples.validation if (digest := _digest(sample)) is not None]
    both = sum(digest in own for digest in others)
    known = bool(own and others)
    return Check(
        Status.WARN if both else Status.PASS if known else Status.SKIPPED,
        f"{both} of {len(others)} validation samples are among {len(own)} training samples"
        if known
        else "the samples are too small to tell a repetition from a coincidence",
        name="train and validation overlap",
        hypotheses=("both loaders read the same file", "split after augmentation or duplication") if both else (),
        actions=("split before anything is repeated, by a key of the record",) if both else (),
    )


def _statistics(samples: Samples) -> Iterator[Check]:
    own, others = _values(samples.train), _values(samples.validation)
    if own is None or others is None:
        return
    (mean, std, count), (other, spread, size) = own, others
    unit = max(std, 1e-12)
    apart = abs(mean - other) / unit
    chance = _ERRORS * math.sqrt(1 / count + 1 / size)  # of whole samples: their elements are not independent
    ratio = max(spread, 1e-12) / unit
    factor = max(ratio, 1 / ratio)
    differ = (apart > _MEANS_APART and apart > chance) or (factor > _DEVIATIONS_APART and min(count, size) >= _ELEMENTS)
    yield Check(
        Status.WARN if differ else Status.PASS,
        f"training data have mean {mean:.3g} and deviation {std:.3g}, validation data {other:.3g} and {spread:.3g}",
        name="train and validation statistics",
        code="DATA908",
        hypotheses=("the transforms differ in normalisation", "another source or another class mix"),
        actions=("share the deterministic part of the transforms between both data sets",),
    )


def _values(samples: list[Any]) -> tuple[float, float, int] | None:
    found = [t.detach().double().flatten() for s in samples if (t := _input(s)) is not None and t.is_floating_point()]
    if len(found) < 2:
        return None
    flat = torch.cat(found)
    flat = flat[torch.isfinite(flat)]
    return (*moments(flat), len(found)) if flat.numel() > 1 else None


def _repeats(samples: Samples) -> Check:
    changed = sum(not _equal(*pair) for pair in samples.repeats)
    return Check(
        Status.WARN if changed else Status.PASS,
        f"{changed} of {len(samples.repeats)} validation samples differ when they are read again",
        name="augmentation on validation",
        hypotheses=("the validation data set has the training transform", "a split that shares it (`random_split`)"),
        actions=("give the validation data set a transform without random parts",),
    )


def _equal(one: Any, other: Any) -> bool:
    pairs = list(zip(tensors_in_objects(one), tensors_in_objects(other), strict=False))
    return all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
