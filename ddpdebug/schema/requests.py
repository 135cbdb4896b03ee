"""Questions of the rules about a step, to the ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdebug.schema.wire import Struct


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Struct):
    """A question to some ranks about one of their recent steps."""

    optimizer: int
    step: int
    kind: str  # of detail
    last: bool = False  # about what the step has left, as it was at the end of the run
    ranks: frozenset[int] = frozenset()  # that are asked
