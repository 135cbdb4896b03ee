"""The class labels given to the losses: the count of each class, and the loss expected of an uninformed model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ddpdebug.probes.training_loop.loss_graph import Term, has_weights, is_mean, labels_of
from ddpdebug.schema.announcements import InitialLoss, LabelCounts
from ddpdebug.schema.row import Flag
from ddpdebug.torch_internals import graph, modules as modules_in, unlisted

_EACH = 0  # the reduction of a loss that is one number for each label: a mask may come behind it
_LEAST = 2  # labels of a step: one alone is always of one class
_MAX_CLASSES = 4096


class Labels:
    """The labels that the losses were given."""

    def __init__(self) -> None:
        self._span: tuple[int, int] | None = None  # of this step
        self._number = 0
        self._counts: torch.Tensor | None = None  # of each class; of these, behind another one of it
        self._reads = 0
        self._weighted = self._masked = False

    def read(self, term: Term) -> None:
        """Count the labels of one loss."""
        found = labels_of(term)
        if found is None or not found[0].numel():
            return
        labels, classes = found
        low, high = (int(v) for v in labels.aminmax())
        self._span = (min(low, self._span[0]), max(high, self._span[1])) if self._span else (low, high)
        self._number += labels.numel()
        if classes <= _MAX_CLASSES and low >= 0 and high < classes:
            again = labels[1:][labels[1:] == labels[:-1]]
            counts = torch.stack([torch.bincount(some, minlength=classes) for some in (labels, again)])
            same = self._counts is not None and self._counts.shape == counts.shape
            self._counts = unlisted(counts + self._counts if same and self._counts is not None else counts)
            self._reads = self._reads + 1 if same else 1
            self._weighted = self._weighted or has_weights(term)
            self._masked = self._masked or graph.saved_number(term.node, "reduction") == _EACH

    def take(self, detail: dict[str, Any]) -> Flag:
        """Return a flag if all labels of the step are of one class, and begin the next step."""
        span, number, self._span, self._number = self._span, self._number, None, 0
        if span is None or span[0] != span[1] or number < _LEAST:
            return Flag(0)
        detail["label"], detail["labels"] = span[0], number
        return Flag.SINGLE_CLASS

    def counts(self, models: Iterable[torch.nn.Module] = ()) -> LabelCounts | None:
        """Return the count of each class, and the class that an embedding of one of the models pads with."""
        if self._counts is None:
            return None
        counts, again = self._counts.tolist()
        largest = max(range(len(counts)), key=lambda c: counts[c])
        padding = None if self._masked or self._weighted else _padding(models, len(counts))
        return LabelCounts(
            classes=len(counts),
            seen=sum(counts),
            reads=self._reads,
            present=sum(n > 0 for n in counts),
            largest=largest,
            share=counts[largest] / max(1, sum(counts)),
            weighted=self._weighted,
            padding=padding,
            # the token that ends a text may be the padding too: one that stands alone is the end
            padded=0 if padding is None or 2 * again[padding] <= counts[padding] else counts[padding],
        )

    @staticmethod
    def initial(term: Term, root: torch.Tensor, scale: float | None) -> InitialLoss | None:
        """Return the first loss of a run with the number of classes; None if one of them is unknown."""
        found = labels_of(term)
        if found is None or not is_mean(term) or term.scaled or root.device.type != "cpu" or has_weights(term):
            return None
        value = float(root.detach()) / (scale or 1.0)
        return InitialLoss(classes=found[1], loss=value) if math.isfinite(value) else None


def _padding(models: Iterable[torch.nn.Module], classes: int) -> int | None:
    """Return the token that an embedding of all classes takes for padding."""
    for model in models:
        for module in modules_in(model):
            if isinstance(module, torch.nn.Embedding) and module.num_embeddings == classes:
                return module.padding_idx
    return None
