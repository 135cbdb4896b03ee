"""The distribution of the loss's targets: the loss of a model that knows only their frequencies.

Read from the graph of the loss, in the first backward passes and in checked steps, where the loss is one mean of
cross entropies, of binary ones, or of squares, and where its targets are in host memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container

import torch

from ddpdebug import fingerprint
from ddpdebug.probes.training_loop.loss_graph import Term, chain, has_weights, is_mean, labels_of, name_of
from ddpdebug.schema import announcements
from ddpdebug.torch_internals import graph, is_plain, unlisted

_MAX_CLASSES, _MAX_COLUMNS, _MAX_ELEMENTS = 4096, 256, 1 << 16
_TOLD_CLASSES = 256  # of more, no counts are told
#: Losses after which it is told, and then each time twice as many.
_FIRST_TOLD, _LAST_TOLD = 16, 2048
_NUMBERS = 16

#: Labels from which on two equal lists are one list that comes again, and how many lists are remembered.
_LIST, _MAX_LISTS = 8, 4096


class Targets:
    """The targets of one loss; reset by another loss."""

    def __init__(self) -> None:
        self._key: tuple[str, int] | None = None
        self._begin(None)

    def _begin(self, key: tuple[str, int] | None) -> None:
        self._key, self._reads, self._seen = key, 0, 0
        self._counts: torch.Tensor | None = None  # of labels by class
        self._sums: torch.Tensor | None = None  # of targets, and of their squares, by column
        self._squares: torch.Tensor | None = None
        self._digests: set[int] = set()
        self._fresh: torch.Tensor | None = None  # counts without lists of labels that have come before
        self._lists: set[int] = set()  # digests of these
        self._whole = True  # each list had as many labels of each class
        self._numbers: deque[float] = deque(maxlen=_NUMBERS)

    def read(
        self, terms: list[Term], root: torch.Tensor, rows: Container[int], *, by_scaler: bool
    ) -> announcements.Targets | None:
        """Count the targets of a loss; return their statistics when it is time to announce them.

        Chance is told where each sample has one target, and `rows` has their number: a language model that predicts
        each token stays for a while at how frequent the tokens are, on its way to more.
        """
        if len(terms) != 1:
            return None
        term = terms[0]
        labels, before = labels_of(term), self._seen
        if not (self._classes(term, *labels) if labels is not None else self._columns(term)):
            return None
        self._reads += 1
        found, local = chain(root, by_scaler=by_scaler), is_mean(term) and not term.scaled
        parts = 0.0 if found is None else math.prod(found.divisors)
        if labels is not None and is_mean(term):
            parts = (parts or float(local)) * len(labels[0])
        self._numbers.append(0.0 if parts == 1.0 else parts)
        if self._reads not in range(_FIRST_TOLD, _LAST_TOLD + 1) or self._reads & (self._reads - 1):
            return None
        by_sample = self._seen - before in rows
        return self._told(term, plain=local and by_sample and not has_weights(term))

    def _classes(self, term: Term, labels: torch.Tensor, classes: int) -> bool:
        if not labels.numel() or classes > _MAX_CLASSES:
            return False
        low, high = labels.aminmax()
        if int(low) < 0 or int(high) >= classes:
            return False
        if self._key != (key := (name_of(term), classes)):
            self._begin(key)
        counts = torch.bincount(labels, minlength=classes)
        self._counts = unlisted(counts if self._counts is None else self._counts + counts)
        self._whole = self._whole and torch.equal(counts * (self._reads + 1), self._counts)
        digest = fingerprint.fingerprint(labels)
        many = len(labels) >= _LIST and int(low) != int(high)  # few labels are the same by chance
        if self._fresh is None or not many or digest not in self._lists:
            self._fresh = unlisted(counts if self._fresh is None else self._fresh + counts)
        if len(self._lists) < _MAX_LISTS:
            self._lists.add(digest)
        self._note(labels)
        return True

    def _columns(self, term: Term) -> bool:
        target = graph.saved_tensor(term.node, "target")
        known = target is not None and is_plain(target) and target.device.type == "cpu" and target.is_floating_point()
        if target is None or not known or not 0 < target.numel() <= _MAX_ELEMENTS or not target.dim():
            return False
        table = target.detach().reshape(len(target), -1).double()
        if table.shape[1] > _MAX_COLUMNS:
            return False
        if self._key != (key := (name_of(term), table.shape[1])):
            self._begin(key)
        sums, squares = table.sum(0), table.square().sum(0)
        self._sums = unlisted(sums if self._sums is None else self._sums + sums)
        self._squares = unlisted(squares if self._squares is None else self._squares + squares)
        self._note(table[:, 0].contiguous(), len(table))
        return True

    def _note(self, values: torch.Tensor, number: int | None = None) -> None:
        self._seen += len(values) if number is None else number
        if len(self._digests) < 2:
            self._digests.add(fingerprint.fingerprint(values))

    def _told(self, term: Term, *, plain: bool) -> announcements.Targets:
        counts = None if self._fresh is None else self._fresh.tolist()
        return announcements.Targets(
            loss=name_of(term),
            reads=self._reads,
            seen=self._seen,
            classes=None if counts is None else len(counts),
            counts=tuple(counts) if counts is not None and len(counts) <= _TOLD_CLASSES else (),
            chance=self._chance(name_of(term)) if plain else None,
            fixed=len(self._digests) < 2,
            whole=self._whole and self._counts is not None and len(self._digests) > 1,
            numbers=tuple(self._numbers),
        )

    def _chance(self, loss: str) -> float | None:
        """Return the loss of the best constant answer."""
        if self._counts is not None:
            shares = (self._counts[self._counts > 0] / self._counts.sum()).tolist()
            return -math.fsum(share * math.log(share) for share in shares)
        if self._sums is None or self._squares is None:
            return None
        means = self._sums / self._seen
        if loss.startswith("BinaryCrossEntropy"):
            inner = means.clamp(1e-12, 1 - 1e-12)
            return float(-(inner * inner.log() + (1 - inner) * (1 - inner).log()).mean())
        return float((self._squares / self._seen - means.square()).mean()) if loss == "MseLoss" else None
