"""Assertions that a tensor or a model is the same on all ranks, and that the ranks train like one process."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.ci.equivalence import Build, judge, measure
from ddpdebug.diagnosis.reporter import unravel
from ddpdebug.probes.values import raw_bytes
from ddpdebug.schema.announcements import Equivalence
from ddpdebug.schema.details import hex_digest
from ddpdebug.schema.finding import Severity
from ddpdebug.schema.step import outvoted
from ddpdebug.schema.wire import from_json, to_json
from ddpdebug.sinks.text import parts
from ddpdebug.sinks.words import clean, counted, ranks_text
from ddpdebug.testing.meeting import Meeting

#: A tensor is compared in at most this many blocks, none of them smaller than that.
_MAX_BLOCKS = 4096
_MIN_BLOCK = 4096
#: With a tolerance most blocks differ a little, so that they are larger.
_TOLERANT_BLOCK = 1 << 18
_MAX_NAMES = 5


class _Tolerance(NamedTuple):
    rtol: float
    atol: float

    @property
    def exact(self) -> bool:
        return self.rtol == 0 and self.atol == 0


def assert_ranks_agree(
    tensor: Tensor, name: str | None = None, *, rtol: float = 0.0, atol: float = 0.0, timeout: float = 30.0
) -> None:
    """Assert that `tensor` is the same on all ranks of the default group, bit for bit unless a tolerance is given.

    Args:
        name: what the tensor is, for the message.
        tensor: of the same shape and dtype on all ranks, on any device.
        rtol: together with `atol` as in `torch.testing.assert_close`, against rank 0; NaN agrees with NaN.
        timeout: seconds to wait for the other ranks.

    Raises:
        AssertionError: on all ranks, with the ranks that differ and the first element; or a rank did not come in time.
        ddpdebug.UsageError: there is no process group.
    """
    label = "tensor" if name is None else clean(name, 160)
    meeting = Meeting(f"assert_ranks_agree({'' if name is None else repr(name)})", timeout)
    facts = meeting.tell_json([label, *_facts(tensor)])
    _compare_names([fact[:1] for fact in facts])
    _compare_kinds(label, [fact[1:3] for fact in facts])
    if len({fact[3] for fact in facts}) > 1:
        difference = _difference(meeting, tensor, _Tolerance(rtol, atol))
        if difference:
            raise AssertionError(f"{label} differs between ranks: {difference}")


def assert_replicas_agree(
    model: torch.nn.Module, *, rtol: float = 0.0, atol: float = 0.0, timeout: float = 30.0
) -> None:
    """Assert that all parameters and buffers of `model` are the same on all ranks of the default group.

    What stands on DDP's ignore list is left out: it differs on purpose.

    Args:
        rtol: as for `assert_ranks_agree`.
        timeout: seconds to wait for the other ranks.

    Raises:
        AssertionError, ddpdebug.UsageError: as `assert_ranks_agree`.
    """
    module = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = dict(_tensors(module))
    meeting = Meeting("assert_replicas_agree(...)", timeout)
    facts = meeting.tell_json({name: _facts(tensor) for name, tensor in tensors.items()})
    _compare_names([list(fact) for fact in facts])
    for name in tensors:
        _compare_kinds(name, [fact[name][:2] for fact in facts])
    suspects = [name for name in tensors if len({fact[name][2] for fact in facts}) > 1]
    tolerance = _Tolerance(rtol, atol)
    for index, name in enumerate(suspects):
        difference = _difference(meeting, tensors[name], tolerance)
        if difference:
            others = suspects[index + 1 :] if tolerance.exact else []
            raise AssertionError(f"{clean(name, 160)} differs between ranks: {difference}{_and(others)}")


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    ignored = internals.ignored_names(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in ignored:
            yield name, tensor


def _facts(tensor: Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [list(tensor.shape), dtype, hex_digest(fingerprint.fingerprint(tensor.detach()))]


def _compare_names(names: Sequence[Sequence[str]]) -> None:
    """Compare the names that each rank has, in any order."""
    everything = {name: None for own in names for name in own}
    lacking = {name: [rank for rank, own in enumerate(names) if name not in own] for name in everything}
    lacking = {name: ranks for name, ranks in lacking.items() if ranks}
    if lacking:
        parts = [f"{clean(name, 160)} is not on {ranks_text(ranks)}" for name, ranks in lacking.items()]
        more = f" and {len(parts) - _MAX_NAMES} more" if len(parts) > _MAX_NAMES else ""
        raise AssertionError(f"the ranks compare different things: {', '.join(parts[:_MAX_NAMES])}{more}")


def _compare_kinds(name: str, kinds: Sequence[Sequence[Any]]) -> None:
    labels = {rank: f"{dtype}{shape}" for rank, (shape, dtype) in enumerate(kinds)}
    if len(set(labels.values())) > 1:
        raise AssertionError(f"{clean(name, 160)} has another shape or dtype: {_vote(labels)}; {_by_value(labels)}")


def _difference(meeting: Meeting, tensor: Tensor, tolerance: _Tolerance) -> str:
    """Return where the ranks' tensors differ first and how; empty when they agree within the tolerance."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    flat = values.reshape(-1).cpu()
    smallest = _MIN_BLOCK if tolerance.exact else _TOLERANT_BLOCK
    size = max(smallest, -(-flat.numel() // _MAX_BLOCKS))
    blocks = [flat[start : start + size].contiguous() for start in range(0, flat.numel(), size)]
    told = meeting.tell_json([hex_digest(fingerprint.fingerprint(block)) for block in blocks])
    for number, digests in enumerate(zip(*told, strict=True)):
        if len(set(digests)) > 1:
            rows = torch.stack([_read(data, flat.dtype) for data in meeting.tell(raw_bytes(blocks[number]))])
            found = _first(rows, tolerance)
            if found is not None:
                index = unravel(number * size + found, tensor.shape)
                labels = _opinions(rows[:, found], tolerance)
                shown = {rank: rows[rank, found].item() for rank in range(meeting.world)}
                return f"{_vote(labels)}; first at {index}: {_by_value(shown)}"
    return ""


def _first(rows: Tensor, tolerance: _Tolerance) -> int | None:
    """Return the first column in which the rows (one per rank) disagree."""
    if tolerance.exact:
        raw = _raw(rows)
        wrong = (raw != raw[:1]).any(dim=0).any(dim=-1)
    else:
        wrong = ~_close(rows, rows[:1], tolerance).all(dim=0)
    where = wrong.nonzero()
    return int(where[0]) if len(where) else None


def _opinions(column: Tensor, tolerance: _Tolerance) -> dict[int, Hashable]:
    """Return a label for each rank's value; ranks with equal labels agree."""
    if tolerance.exact:
        return {rank: bytes(row.tolist()) for rank, row in enumerate(_raw(column))}
    agrees = [_close(column, value, tolerance) for value in column]
    return {rank: tuple(row.tolist()) for rank, row in enumerate(agrees)}


def _close(values: Tensor, reference: Tensor, tolerance: _Tolerance) -> Tensor:
    wide = torch.complex128 if values.is_complex() else torch.float64
    return torch.isclose(values.to(wide), reference.to(wide), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


def _raw(values: Tensor) -> Tensor:
    """Return the bytes of each element as a further dimension."""
    return values.contiguous().view(torch.uint8).reshape(*values.shape, values.element_size())


def _read(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def _vote(labels: Mapping[int, Hashable]) -> str:
    """Return who stands against whom; where no side is the largest nobody is blamed."""
    blamed = outvoted(labels)
    if blamed.undecided:
        return f"{' against '.join(map(ranks_text, blamed.undecided))}, no majority"
    return f"{ranks_text(blamed)} against {ranks_text(labels.keys() - {*blamed})}"


def _by_value(values: Mapping[int, Any]) -> str:
    shown: dict[str, list[int]] = {}
    for rank, value in values.items():
        shown.setdefault(clean(value, 60), []).append(rank)
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in shown.items())


def _and(names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(clean(name, 160) for name in names[:_MAX_NAMES])
    return f"; and so in {counted(len(names), 'more tensor')}: {shown}{', …' if len(names) > _MAX_NAMES else ''}"


def assert_equivalent(
    build: Build,
    *,
    steps: int = 3,
    device: torch.device | None = None,
    mesh: Mapping[str, int] | None = None,
    timeout: float = 30.0,
) -> None:
    """Assert that the ranks of the default group train like one process on the same global batch.

    Args:
        build: returns `model, loss_fn, batch`, and the optimizer if need be; see `ddpdebug.ci.equivalence`.
        steps: how many optimizer steps to compare.
        device: of this rank, where the factory's model is put; the CPU by default.
        mesh: the dimensions and sizes of the mesh that a `build` with a parameter gets, such as `{"dp": 2, "tp": 2}`.
        timeout: seconds to wait for the other ranks before and after the measurement.

    Raises:
        AssertionError: on all ranks, with the parameters that differ; or a rank did not come in time.
        ddpdebug.UsageError: the factory cannot be compared, or there is no process group of at least 2 ranks.
    """
    meeting = Meeting("assert_equivalent(...)", timeout)
    meeting.tell_json("here")
    told = meeting.tell_json(to_json(measure(build, steps=steps, device=device, mesh=mesh)))
    facts = (from_json(Equivalence, said) for said in told)
    for finding in judge({rank: fact for rank, fact in enumerate(facts) if fact is not None}):
        if finding.severity > Severity.INFO:
            lines = [f"{label}: {line}" for label, own in parts(finding, meeting.world) for line in own]
            raise AssertionError("\n".join([f"{finding.code} {finding.title}", *lines]))
