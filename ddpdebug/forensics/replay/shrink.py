"""Finds the smallest subsets of a batch with which a replay still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddpdebug.forensics.replay.replay import Trace
from ddpdebug.nested import leaves, mapped
from ddpdebug.probes.forward_capture import ForwardCapture

_MAX_RUNS = 2000


@dataclass(slots=True, kw_only=True)
class Shrunk:
    """Minimal failing subsets, as indices along the first dimension of the inputs."""

    batch: int
    subsets: list[list[int]] = field(default_factory=list)
    runs: int = 0
    reason: str | None = None  # why there are none, or not all


class _OutOfRunsError(Exception):
    """Ends the search after `max_runs` replays."""


def shrink(
    capture: ForwardCapture, whole: Trace, run: Callable[[ForwardCapture], Trace], *, max_runs: int = _MAX_RUNS
) -> Shrunk:
    """Run ever smaller parts of the batch; samples that fail alone are all found, others as one combination.

    Args:
        whole: the trace of the whole batch.
        run: replays a capture.
    """
    batch = batch_size(capture)
    found = Shrunk(batch=batch)
    if whole.culprit is None or batch < 2:
        found.reason = "nothing failed" if whole.culprit is None else "the inputs have no first dimension to divide"
        return found
    wanted = (whole.culprit.kind, whole.culprit.name, whole.culprit.phase)

    def fails(samples: Sequence[int]) -> bool:
        if found.runs >= max_runs:
            raise _OutOfRunsError
        found.runs += 1
        culprit = run(part(capture, samples, batch)).culprit
        return culprit is not None and (culprit.kind, culprit.name, culprit.phase) == wanted

    try:
        _search(list(range(batch)), fails, found.subsets)
    except _OutOfRunsError:
        found.reason = f"stopped after {max_runs} runs"
    found.subsets.sort()
    return found


def _search(samples: list[int], fails: Callable[[Sequence[int]], bool], subsets: list[list[int]]) -> None:
    """Divide a failing set: each half that fails alone is searched; if none does, it takes samples of both."""
    if len(samples) == 1:
        subsets.append(samples)
        return
    middle = len(samples) // 2
    halves = [half for half in (samples[:middle], samples[middle:]) if fails(half)]
    for half in halves:
        _search(half, fails, subsets)
    if not halves:
        subsets.append(_minimal(samples, fails))


def _minimal(samples: list[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return a subset that fails and from which no sample can be taken away (delta debugging)."""
    pieces = 2
    while len(samples) > 1:
        size = -(-len(samples) // pieces)
        for start in range(0, len(samples), size):
            rest = samples[:start] + samples[start + size :]
            if rest and fails(rest):
                samples, pieces = rest, max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(len(samples), 2 * pieces)
    return samples


def batch_size(capture: ForwardCapture) -> int:
    """Return the first dimension of the first input that has one, 0 without any."""
    tensors = (value for _, value in leaves((capture.args, capture.kwargs)) if isinstance(value, torch.Tensor))
    return next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), 0)


def part(capture: ForwardCapture, samples: Sequence[int], batch: int) -> ForwardCapture:
    """Return the forward of some samples: what has the batch's size in its first dimension is cut."""
    rows = torch.tensor(samples)

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != batch:
            return value
        return value.detach().index_select(0, rows.to(value.device)).requires_grad_(value.requires_grad)

    gradients = {position: cut(gradient) for position, gradient in capture.gradients.items()}
    return replace(capture, given=(mapped(capture.args, cut), mapped(capture.kwargs, cut)), gradients=gradients)
