"""Runs a model on its inputs and on these in another order, and compares what comes of the samples.

Loaded and run in a disposable copy of the process; see `sample_mixing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.forensics import padded
from ddpdebug.forensics.counted_batch import LEAST, Batch
from ddpdebug.forensics.forward_trial import Operations, again, prepared
from ddpdebug.forensics.replay.stack_lines import line_of, user_stack
from ddpdebug.forensics.replay.tracer import Stopped
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import tensors_in
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.schema.announcements import SampleMixing
from ddpdebug.schema.wire import to_json

#: Results of operations that are remembered to find the one that mixes.
_MOST = 20_000
_ROUNDING, _EPSILONS = 1e-4, 8
#: Operations that draw: in eval mode only models that sample have them, and what they make differs by place.
_RANDOM = frozenset(
    {"normal", "randn", "randn_like", "rand", "rand_like", "uniform", "bernoulli"}
    | {"multinomial", "native_dropout", "randint", "randint_like", "randperm", "exponential"}
)
#: Layers that take the statistics of the batch in eval mode where they keep none.
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(slots=True)
class _Pass:
    """What a run of a model makes of a batch, row by row along one dimension of the inputs.

    Args:
        before: the run with which it is compared.
    """

    dim: int
    size: int
    before: _Pass | None = None
    rows: list[tuple[str, list[torch.Tensor]]] = field(default_factory=list)  # by operation
    outputs: list[torch.Tensor] = field(default_factory=list)
    random: bool = False
    path: list[str] = field(default_factory=list)  # of the modules whose forward runs
    same: bool = True  # so far the operations are those of the run before
    mixer: tuple[str, str, str | None] | None = None  # operation, module, line that first mixed rows

    def note(self, name: str, _: tuple[Any, ...], output: Any) -> None:
        """Take what an operation has returned."""
        self.random = self.random or name in _RANDOM
        for tensor in tensors_in(output):
            if self.same and len(self.rows) < _MOST:
                self.rows.append((name, self._sums(tensor)))
                if self.before is not None:
                    self._against(self.before.rows)

    def _against(self, known: list[tuple[str, list[torch.Tensor]]]) -> None:
        name, rows = self.rows[-1]
        first = known[len(self.rows) - 1] if len(self.rows) <= len(known) else ("", [])
        if first[0] != name or len(first[1]) != len(rows):  # another way through the forward
            self.same = False
        elif rows and _is_mixed(first[1], rows):
            stack = user_stack()
            self.mixer = name, self.path[-1] if self.path else "", line_of(stack[0]) if stack else None
            self.same = False

    def _sums(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return two sums of each row, (2, size), for each dimension that may count them."""
        if not tensor.is_floating_point() or not internals.is_plain(tensor):
            return []
        found = []
        for dim, length in enumerate(tensor.shape):
            if length == self.size:
                table = tensor.detach().movedim(dim, 0).reshape(self.size, -1).double()
                weights = torch.linspace(0.0, 7.0, table.shape[1], dtype=table.dtype).cos()
                found.append(torch.stack([table @ weights, table.abs().sum(1)]))
        return found

    def follow(self, name: str, part: nn.Module) -> list[Any]:
        """Return the hooks on a module by which `path` is known."""

        def enter(*_: Any) -> None:
            self.path.append(name)

        def leave(*_: Any) -> None:
            self.path.pop()

        return [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]

    def counts(self, tensor: torch.Tensor) -> bool:
        """Return whether an output has one row a sample, and is no table of samples against samples."""
        if not tensor.is_floating_point() or not internals.is_plain(tensor) or tensor.dim() <= self.dim:
            return False
        return tensor.shape[self.dim] == self.size and list(tensor.shape).count(self.size) == 1


def _order(size: int) -> torch.Tensor:
    """Return which row each place gets: the first half comes last, turned round, and all others are the first row."""
    kept = size // 2
    return torch.tensor([0] * (size - kept) + list(range(kept))[::-1])


def _kept(table: torch.Tensor, dim: int, *, other: bool) -> torch.Tensor:
    """Return the rows that are kept, in their first order, of a run with the other order or without."""
    size = table.shape[dim]
    kept = size // 2
    return table.narrow(dim, size - kept, kept).flip(dim) if other else table.narrow(dim, 0, kept)


def look(capture: ForwardCapture, batch: Batch) -> SampleMixing | None:
    """Return how the outputs of a sample follow the others; None if that cannot be measured."""
    module = capture.module()
    if module is None or any([_takes_statistics(part) for part in internals.modules(module)]):
        return None
    along, pooled = _compare(capture, 0, batch.size)
    if along is None or along.change <= 0 or batch.certain or (pooled and batch.size != batch.length > 0):
        return along
    across = _compare(capture, 1, batch.length)[0] if batch.length >= LEAST else None
    return along if across is not None and across.change > 0 else None


def _takes_statistics(part: nn.Module) -> bool:
    """Return whether a module takes the statistics of the batch in eval mode too, as it was told to."""
    return isinstance(part, _STATISTICS) and part.running_mean is None


def _compare(capture: ForwardCapture, dim: int, size: int) -> tuple[SampleMixing | None, bool]:
    """Return how outputs follow the others along a dimension of the inputs, and whether they have no positions."""
    one = _run(capture, _Pass(dim, size), None)
    if one is None or one.random or not one.outputs:
        return None, False
    other = _run(capture, _Pass(dim, size, one), _order(size))
    if other is None or len(one.outputs) != len(other.outputs):
        return None, False
    changes = [_change(a, b, dim) for a, b in zip(one.outputs, other.outputs, strict=True)]
    name, module, line = other.mixer or (None, None, None)
    told = SampleMixing(samples=size, change=min(changes), operation=name, module=module, location=line)
    return told, all([output.dim() < 3 for output in one.outputs])


def _change(one: torch.Tensor, other: torch.Tensor, dim: int) -> float:
    """Return the change of the row that changes least, as a share of the largest value; 0 for what is rounding."""
    if one.shape != other.shape:
        return 0.0
    before = _kept(one, dim, other=False).movedim(dim, 0).reshape(one.shape[dim] // 2, -1).float().nan_to_num(0, 0, 0)
    after = _kept(other, dim, other=True).movedim(dim, 0).reshape(one.shape[dim] // 2, -1).float().nan_to_num(0, 0, 0)
    least = float((before - after).abs().amax(1).min()) / max(float(before.abs().max()), 1e-12)
    return least if least > max(_ROUNDING, _EPSILONS * torch.finfo(one.dtype).eps) else 0.0


def _run(capture: ForwardCapture, made: _Pass, order: torch.Tensor | None) -> _Pass | None:
    """Run the model on its inputs in another order; None where it cannot be run."""
    ready = prepared(capture)
    if ready is None:
        return None

    def changed(value: Any) -> Any:
        if order is None or not is_a(value, torch.Tensor) or value.dim() <= made.dim:
            return value
        return value.index_select(made.dim, order) if value.shape[made.dim] == made.size else value

    handles = [handle for name, part in internals.named_modules(ready.module) for handle in made.follow(name, part)]
    try:
        output = again(capture, ready, changed, Operations(made.note))
    finally:
        for handle in handles:
            handle.remove()
    made.outputs = [tensor for tensor in tensors_in(output) if made.counts(tensor)]
    return made


def _is_mixed(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Return whether no dimension's rows went with the samples, and they are not what they were either."""
    if any([_alike(_kept(a, 1, other=False), _kept(b, 1, other=True)) for a, b in zip(before, after, strict=True)]):
        return False
    return not all([_alike(a, b) for a, b in zip(before, after, strict=True)])


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().nan_to_num(0, 0, 0).max()) <= 1e-3 * max(float(one[1].abs().max()), 1e-12)


def look_at(capture: ForwardCapture, batch: Batch) -> list[Any]:
    """Return, as JSON values, how a model mixes samples and what less padding does; None for what is not known."""
    return [to_json(_quietly(look, capture, batch)), to_json(_quietly(padded.look, capture))]


def _quietly(look: Callable[..., Any], *given: Any) -> Any:
    try:
        return look(*given)
    except (Exception, Stopped) as error:
        if is_users(error):
            raise
        return None
