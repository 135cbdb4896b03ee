"""The samples given to a model: equal within a batch, seen in training before, or with dimensions mixed up.

Rows are known by fingerprints of their bytes in host memory; nothing else is asked of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.fingerprint import row_fingerprints
from ddpdebug.probes.entries import Entries
from ddpdebug.probes.training_loop.modes import DROPOUTS
from ddpdebug.probes.training_loop.rollouts import with_rows
from ddpdebug.schema.announcements import LossBroadcast, RepeatedDeliveries

#: Forwards that are looked at for what their rows have in common, all of which are to show it; rows of these.
_FORWARDS, _LEAST = 4, 8
#: Bytes of a tensor that is read whole.
_MAX_BYTES = 256 << 20
#: Rows of one forward, and of all, that are remembered as trained on; bytes that tell one from another.
_ROWS, _MAX_ROWS, _ROW_BYTES = 64, 1 << 14, 16
#: Share of the rows of each forward of an evaluation that were trained on, and evaluations until it is told.
_KNOWN, _EVALUATIONS = 0.25, 2


class Views:
    """Equality of rows in the first batches: all rows, two halves of a batch, or two forwards of a step."""

    def __init__(self) -> None:
        self._looked = self._rows = self._halves = self._again = 0  # forwards, and of these such that show it
        self._before: tuple[list[int], list[int]] = ([], [])  # digests and addresses of the newest forward

    def forward(self, root: nn.Module, tensors: Sequence[torch.Tensor], *, first: bool) -> RepeatedDeliveries | None:
        """Examine a training forward; `first` if it is the first one since a backward."""
        if self._looked >= 2 * _FORWARDS:
            return None
        rows = [t for t in with_rows(tensors) if len(t) >= _LEAST]
        floats = [t for t in rows if t.is_floating_point() and t.nbytes <= _MAX_BYTES]
        halves = [row_fingerprints(t, t.nbytes // 2, 2) for t in floats if not len(t) % 2]
        digests = [value for t in floats for value in row_fingerprints(t, t.nbytes, 1)]
        places = [t.data_ptr() for t in floats]
        again = not first and digests == self._before[0] and set(places).isdisjoint(self._before[1])
        self._before = digests, places
        self._looked += 1
        self._rows += bool(rows) and all([len({*row_fingerprints(t, t.nbytes // len(t), _ROWS)}) == 1 for t in rows])
        self._halves += bool(halves) and all([len(half) == 2 and half[0] == half[1] for half in halves])
        self._again += again and bool(digests)
        if self._looked == self._rows == _FORWARDS:
            return RepeatedDeliveries(batches=_FORWARDS, again=0, inside="rows")
        views = self._again == _FORWARDS or self._looked == self._halves == _FORWARDS
        if not views or self._rows or any([isinstance(m, DROPOUTS) and m.p > 0 for m in internals.modules(root)]):
            return None  # dropout makes two views of one
        return RepeatedDeliveries(batches=_FORWARDS, again=0, inside="views")


class Known:
    """Whether evaluations get training samples only; one forward of everything, as of a graph, is for both."""

    def __init__(self) -> None:
        self._trained: set[int] = set()
        self._first: list[int] | None = None  # rows of the first forward, until another one had others
        self._varies = False
        self._seen = self._new = self._evaluations = 0

    def trains(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Remember training rows, as long as they are few."""
        if len(self._trained) < _MAX_ROWS and self._evaluations >= 0:
            rows = _rows(tensors())
            self._first = rows if self._first is None else self._first
            self._varies = self._varies or rows != self._first
            self._trained.update(rows)

    def evaluates(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Examine a forward of an evaluation, unless an earlier one got other samples."""
        if self._new or self._evaluations < 0:
            return
        rows = _rows(tensors())
        if rows == self._first and not self._varies:
            return
        known = sum(row in self._trained for row in rows)
        self._seen += known
        self._new += not rows or known < _KNOWN * len(rows)

    def ends(self, *, evaluated: bool) -> int:
        """Return, once, the number of samples in several evaluations that were all training samples; else 0."""
        seen, new, self._seen, self._new = self._seen, self._new, 0, 0
        if not evaluated or not (seen or new) or self._evaluations < 0:
            return 0
        self._evaluations = self._evaluations + 1 if seen >= _LEAST and not new else 0
        if self._evaluations < _EVALUATIONS:
            return 0
        self._evaluations = -1
        return seen


class Axes:
    """Whether a time-first layer gets batch-first input, in the first forward."""

    def __init__(self, entries: Entries) -> None:
        self._hook = entries.before_modules("probe:axes", self._look)
        self._seen: dict[str, tuple[int, ...]] = {}

    def begin(self) -> None:
        """Observe the forward that begins now."""
        if not internals.anything_compiled():
            self._hook.on((nn.RNNBase, nn.MultiheadAttention))

    def release(self) -> None:
        """Remove the hook."""
        self._hook.off()

    def _look(self, module: nn.Module, args: Any) -> None:
        given = args[0] if args else None
        time_first = internals.own_attribute(module, "batch_first", True) is False
        if time_first and type(given) is torch.Tensor and given.dim() == 3 and 1 not in given.shape[:2]:
            self._seen.setdefault(type(module).__name__, tuple(given.shape))

    def mixed(self, target: torch.Tensor | None) -> LossBroadcast | None:
        """Return a layer whose time dimension has as many entries as there are samples; None if there is none."""
        rows = 0 if target is None or not target.dim() or target.numel() != len(target) else len(target)
        layers = [(name, shape) for name, shape in self._seen.items() if shape[0] == rows]
        if not layers or any([shape[1] == rows for shape in self._seen.values()]):
            return None
        self._seen.clear()
        return LossBroadcast(loss="", layer=layers[0][0], prediction=layers[0][1])


def sample_rows(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return fingerprints of the rows of the first tensor that has some that are hardly equal by chance."""
    for tensor in with_rows(tensors):
        if tensor.nbytes // len(tensor) >= _ROW_BYTES:
            return row_fingerprints(tensor, tensor.nbytes // len(tensor), _ROWS)
    return []


def _rows(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return fingerprints of the rows of the first tensor of floats that has some that can be told apart."""
    for tensor in with_rows(tensors):
        if tensor.is_floating_point() and tensor.nbytes // len(tensor) >= _ROW_BYTES:
            return row_fingerprints(tensor, tensor.nbytes // len(tensor), _ROWS)
    return []
