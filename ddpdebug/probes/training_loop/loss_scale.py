"""The weights of a step's micro-batch losses in the gradients: together they should form one mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.probes.training_loop.loss_graph import (
    Term,
    chain,
    counted,
    is_mean,
    name_of,
    takes_classes,
)
from ddpdebug.schema.details import Accumulation


class _Weight(NamedTuple):
    """What a loss was divided by."""

    divisors: tuple[float, ...]
    mean: bool  # the loss function averages by itself
    classes: bool  # it is a cross entropy


class Reduced(NamedTuple):
    """What a sum of gradients over ranks is divided by."""

    divisor: float
    ranks: int


class LossScale:
    """The losses that were given to backward since the last step."""

    def __init__(self) -> None:
        self._chains: list[_Weight | None] = []  # no node: it would keep the graph
        self._counts: list[float] = []  # labels that each of these averages over, where some are left out
        self._unscaled: list[str] = []  # those of which a mean was given as it was
        self._nodes: set[int] = set()  # numbers of the loss functions
        self.twice = False  # one loss function was given to backward a second time

    def note(self, found: Sequence[Term], root: torch.Tensor, *, by_scaler: bool) -> None:
        """Record a loss and its loss functions."""
        numbers = {internals.sequence_of(term.node) for term in found}
        self.twice = self.twice or not self._nodes.isdisjoint(numbers)
        self._nodes |= numbers
        self._unscaled += [name_of(term) for term in found if not term.scaled and is_mean(term)][:1]
        known = chain(root, by_scaler=by_scaler)
        classes = known is not None and takes_classes(Term(known.node, scaled=False))
        self._chains.append(None if known is None else _Weight(known.divisors, known.mean, classes))
        if (count := counted(found[0].node) if len(found) == 1 else None) is not None:
            self._counts.append(count)

    def of(self, passes: int, line: str | None, ranks: int, reduced: Reduced | None = None) -> Accumulation | None:
        """Return the divisors of the losses of `passes` backwards; None if they form a mean, or are unknown.

        Args:
            ranks: over which the gradients are averaged.
            reduced: how their sum over ranks is divided, where that makes no mean of it.
        """
        if reduced is not None:
            known = self.of(passes, line, ranks) is None and self._form_a_mean(passes)
            about = Accumulation(micro_batches=passes, location=line, ranks=reduced.ranks, reduced_by=reduced.divisor)
            return about if known else None
        if passes > 1 and len(self._unscaled) == passes:
            return self._about(passes, line, ranks, 1.0)
        chains = [found for found in self._chains if found is not None]
        if not passes or len(chains) < passes or len({(len(c.divisors), c.mean) for c in chains}) > 1:
            return None
        # what is another number in each pass is the count of what it has
        levels = list(zip(*(c.divisors for c in chains), strict=True))
        fixed = [numbers[0] for numbers in levels if max(numbers) == min(numbers)]
        varying = [numbers for numbers in levels if max(numbers) > min(numbers)]
        if not all([c.mean for c in chains]) and not varying:
            return None
        counts = varying[-1] if varying else self._counts if len(self._counts) == passes else ()
        return self._about(passes, line, ranks, math.prod(fixed), counts)

    def _form_a_mean(self, passes: int) -> bool:
        """Return whether each of the losses is one mean, divided by the number of backwards and by nothing else."""
        known = [found for found in self._chains if found is not None and found.mean]
        return 0 < passes == len(known) and all([math.prod(found.divisors) == passes for found in known])

    def _about(
        self, passes: int, line: str | None, ranks: int, divisor: float, counts: Sequence[float] = ()
    ) -> Accumulation | None:
        if divisor == passes and not (counts and max(counts) > min(counts)):
            return None
        return Accumulation(
            micro_batches=passes,
            location=line,
            loss=self._unscaled[0] if self._unscaled else None,
            divided_by=divisor,
            ranks=ranks,
            classes=any([found is not None and found.classes for found in self._chains]) or None,
            counts=(min(counts), max(counts)) if counts else None,
        )
