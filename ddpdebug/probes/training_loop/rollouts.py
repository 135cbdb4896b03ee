"""Detection of rollouts: forwards without gradients that collect the next training batch (reinforcement learning).

What they were given makes up the batch that is trained on next, and the batch after the collection before is not among
it. An evaluation on training data shows either none of the next batch, or the earlier one as well. Asked of inputs in
host memory only: elsewhere it would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.fingerprint import row_fingerprints

#: Rows of one forward, and of all forwards of an evaluation together, that are remembered; of a batch that trains.
_PER_FORWARD, _MAX_ROWS, _PER_BATCH = 256, 1 << 14, 16
#: Evaluations after which nothing is asked any more.
_MAX_EVALUATIONS = 64


class Rollouts:
    """Compares the inputs of forwards without gradients with the training batches before and after them."""

    def __init__(self) -> None:
        self.has_batch = False  # of an earlier time
        self._given: set[int] = set()
        self._row_bytes = 0
        self._before: dict[int, list[int]] = {}  # bytes of a row -> rows of an earlier batch
        self._evaluations = 0

    def trains(self, batch: Sequence[torch.Tensor]) -> None:
        """Remember rows of a training batch: of samples, and of vectors."""
        self.has_batch = True
        for tensor in with_rows(batch):
            for size in _sizes(tensor):
                self._before.setdefault(size, row_fingerprints(tensor, size, _PER_BATCH))

    def given(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember the input of a forward without gradients: the rows of its first tensor, or a whole vector."""
        first = next(iter(with_rows(tensors)), None)
        if first is None or self._evaluations >= _MAX_EVALUATIONS or len(self._given) >= _MAX_ROWS:
            return
        row_bytes = max(_sizes(first))
        if not self._given:
            self._row_bytes = row_bytes
        if row_bytes == self._row_bytes:
            self._given.update(row_fingerprints(first, row_bytes, _PER_FORWARD))

    def collected(self, batch: Sequence[torch.Tensor]) -> bool:
        """Return whether the inputs since the last call were collected for the present training batch."""
        given, self._given = self._given, set()
        self._evaluations += 1
        if not given:
            return False
        known = (row_fingerprints(t, self._row_bytes, _PER_BATCH) for t in with_rows(batch))
        rows = next(iter([found for found in known if sum(row in given for row in found) * 2 > len(found)]), None)
        before = self._before.get(self._row_bytes) or None
        if rows is None:
            return False
        self._before = {self._row_bytes: rows}
        return before is not None and given.isdisjoint(before)

    def forget(self) -> None:
        """Discard the inputs of forwards that turned out to be no evaluation."""
        self._given.clear()


def with_rows(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that have rows; subclasses, nested and sparse ones, and mapped files are left out."""
    dense = [t for t in tensors if type(t) is torch.Tensor and internals.is_plain(t) and t.dim() and t.numel()]
    return [t for t in dense if internals.is_readable_memory(t)]


def _sizes(tensor: torch.Tensor) -> set[int]:
    """Return the bytes of a sample and of a vector of a tensor."""
    if tensor.dim() == 1:
        return {tensor.nbytes}
    return {tensor.nbytes // tensor.shape[0], tensor.itemsize * tensor.shape[-1]}
