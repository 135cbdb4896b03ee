"""Relation of labels and inputs: simple probes on true against shuffled labels (DATA909)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpdebug.nested import tensors_in_objects
from ddpdebug.preflight.checks.labels import classes_of
from ddpdebug.preflight.observe import Seen
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.preflight.subject import Subject

#: With fewer samples, or fewer for each class, a weak relation is not seen and its absence proves nothing.
_SAMPLES = 300
_PER_CLASS = 30
_MOST = 1024
_FEATURES = 256
_SIDE = 8
_SHUFFLES = 99
#: A pairing that shuffled ones match so often is no better than they are; a real one comes first nearly always.
_AS_GOOD = 0.05
#: Of the ridge, for each sample: about as many features as samples need a strong one.
_RIDGE = 0.3


def check(subject: Subject, seen: list[Seen]) -> Iterator[Check]:
    """Compare the true pairing with shuffled ones; no result if there are too few samples."""
    pair = _from_samples(subject) or _from_batches(seen)
    if pair is None:
        yield Check(Status.SKIPPED, "needs numbers with fractions as inputs and one class number for each")
        return
    inputs, labels = pair
    counts = torch.bincount(labels)
    counts = counts[counts > 0]
    if len(labels) < _SAMPLES or len(counts) < 2 or len(labels) < _PER_CLASS * len(counts):
        need = max(_SAMPLES, _PER_CLASS * max(2, len(counts)))
        summary = f"{len(labels)} samples of {len(counts)} classes are too few for a probe, which needs {need}"
        yield Check(Status.SKIPPED, summary)
        return
    results = probe(inputs, labels)
    best = min(results, key=lambda name: results[name][1])
    score, chance = results[best]
    alike = chance > _AS_GOOD
    yield Check(
        Status.WARN if alike else Status.PASS,
        f"of {_SHUFFLES} shuffled pairings {chance * _SHUFFLES:.0f} fit as well as the real one "
        f"({len(labels)} samples, best of {', '.join(results)}: {100 * score:.0f} % right)",
        code="DATA909",
        evidence={name: {"right": round(s, 3), "shuffled as good": round(c, 3)} for name, (s, c) in results.items()},
        hypotheses=(
            "inputs and labels were shuffled or sorted apart from each other",
            "labels of another file or split",
            "a relation that only a deep model finds: then overfitting a batch says more",
        ),
        actions=("look at some samples with their labels",),
    )


def probe(inputs: Tensor, labels: Tensor) -> dict[str, tuple[float, float]]:
    """Return, by probe, its accuracy (0 to 1) and the share of shuffled pairings (0 to 1) that reach it.

    Nearest neighbour, and a ridge regression onto the classes of features and of their squares, both judged on samples
    that they were not given.

    Args:
        inputs: of shape (samples, ...), floating.
        labels: class numbers of shape (samples,), int64 and not negative.
    """
    generator = torch.Generator().manual_seed(0)
    features = _features(inputs, generator)
    order = [torch.randperm(len(labels), generator=generator) for _ in range(_SHUFFLES)]
    pairings = torch.stack([labels, *(labels[o] for o in order)])
    distances = torch.cdist(features, features).fill_diagonal_(float("inf"))
    nearest = distances.argmin(1)
    neighbour = (pairings[:, nearest] == pairings).double().mean(1)
    half = len(labels) // 2
    results = {"nearest neighbour": neighbour}
    for name, columns in (("linear", features), ("squares", torch.cat([features, features**2], 1))):
        results[name] = _ridge(columns, pairings, half)
    return {name: (float(s[0]), float((s[1:] >= s[0]).double().mean())) for name, s in results.items()}


def _ridge(columns: Tensor, pairings: Tensor, half: int) -> Tensor:
    """Fit on the first half, judge on the second, for all pairings at once."""
    columns = torch.cat([columns, torch.ones(len(columns), 1, dtype=columns.dtype)], 1)
    known, unseen = columns[:half], columns[half:]
    gram = known.T @ known + _RIDGE * half * torch.eye(columns.shape[1], dtype=columns.dtype)
    projector = unseen @ torch.linalg.solve(gram, known.T)
    scores = []
    for pairing in pairings:
        wanted = torch.nn.functional.one_hot(pairing[:half], int(pairing.max()) + 1).to(columns.dtype)
        guess = (projector @ (wanted - wanted.mean(0))).argmax(1)
        # of each class the share that is right: the largest class alone scores no more than any other
        right = (guess == pairing[half:]).double()
        present = pairing[half:].unique()
        scores.append(torch.stack([right[pairing[half:] == c].mean() for c in present]).mean())
    return torch.stack(scores)


def _features(inputs: Tensor, generator: torch.Generator) -> Tensor:
    if inputs.dim() == 4 and min(inputs.shape[2:]) > _SIDE:  # images: noise averages out, their contents do not
        inputs = torch.nn.functional.adaptive_avg_pool2d(inputs.float().nan_to_num(), _SIDE)
    flat = inputs.flatten(1).double().nan_to_num()
    flat = (flat - flat.mean(0)) / flat.std(0).clamp_min(1e-6)
    if flat.shape[1] > _FEATURES:
        flat = flat @ torch.randn(flat.shape[1], _FEATURES, dtype=torch.float64, generator=generator)
        flat = (flat - flat.mean(0)) / flat.std(0).clamp_min(1e-6)
    return flat


def _from_samples(subject: Subject) -> tuple[Tensor, Tensor] | None:
    found = subject.samples.train if subject.samples is not None else []
    pairs = [_pair(sample) for sample in found]
    kept = [pair for pair in pairs if pair is not None]
    return _joined(kept) if len(kept) == len(pairs) >= _SAMPLES else None


def _pair(sample: Any) -> tuple[Tensor, Tensor] | None:
    if not isinstance(sample, Sequence) or len(sample) != 2:
        return None
    tensor, label = next(tensors_in_objects(sample[0]), None), sample[1]
    number = torch.as_tensor(label) if isinstance(label, int | Tensor) else None
    if tensor is None or not tensor.is_floating_point() or number is None or number.numel() != 1:
        return None
    return None if number.is_floating_point() else (tensor[None], number.reshape(1).long())


def _from_batches(seen: list[Seen]) -> tuple[Tensor, Tensor] | None:
    pairs = []
    for s in seen:
        call = s.calls[0] if s.calls else None
        tensor = next((t for t in s.inputs if t.is_floating_point() and t.dim() > 1), None)
        if call is None or classes_of(call) is None or call.target.dim() != 1 or tensor is None:
            return None
        if len(tensor) != len(call.target):
            return None
        pairs.append((tensor.detach(), call.target.detach()))
    return _joined(pairs)


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    if len({pair[0].shape[1:] for pair in pairs}) != 1:
        return None
    inputs, labels = (torch.cat([pair[at].cpu() for pair in pairs])[:_MOST] for at in range(2))
    # the same sample in several batches would let the nearest neighbour know its label
    _, first = inputs.flatten(1).unique(dim=0, return_inverse=True)
    keep = torch.zeros(len(inputs), dtype=torch.bool)
    keep[torch.tensor(list({int(group): at for at, group in enumerate(first)}.values()))] = True
    inputs, labels = inputs[keep], labels[keep]
    valid = labels >= 0
    return inputs[valid], labels[valid]
