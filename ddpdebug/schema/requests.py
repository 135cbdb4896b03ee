"""Detail requests of the rules to the ranks, about a step. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdebug.schema.wire import Struct


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Struct):
    """A request to some ranks for a detail of one of their recent steps."""

    optimizer: int
    step: int
    kind: str  # of detail
    last: bool = False  # about what the step has left, as it was at the end of the run
    ranks: frozenset[int] = frozenset()  # that are asked
