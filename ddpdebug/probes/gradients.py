"""Gradients before and after DDP reduces them: linear checksums, norms, fingerprints.

A gradient is read once after the reduction, and everything that is wanted of it is taken while it is in the cache: for
a large model the time goes into memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.record import Part, SinceLastStep

#: Of a tensor whose norm is taken with those of others: torch 2.6 counts them with 32 bits there.
_MOST_ELEMENTS = (1 << 31) - 1
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_EXACT = frozenset({torch.float32, torch.float64})


class Reduced(NamedTuple):
    """The numbers of a gradient right after its reduction; `key` shows whether it was changed since."""

    sum: Any
    norm: Any
    digest: int
    key: tuple[int, int, int | None, int]


@dataclass(slots=True)
class GradientSums(Part, key="probe:gradients"):
    """The numbers taken of gradients in backward, by the parameter's id; `GradientDigests` decides which count."""

    local: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # (sum, norm) before the reduction
    reduced: dict[int, Reduced] = field(default_factory=dict)  # after it

    def is_summed(self, key: int) -> bool:
        """Return whether a parameter's gradient was summed whenever it was read."""
        local, reduced = self.local.get(key), self.reduced.get(key)
        return (local is None or local[0] is not None) and (reduced is None or reduced.sum is not None)

    def let_go(self) -> None:
        """Drop the numbers, which are on the gradients' device."""
        self.local.clear()
        self.reduced.clear()


def note_local(
    since: SinceLastStep, rows: Sequence[tuple[Wrapper, int, torch.Tensor]]
) -> list[tuple[Wrapper, int, torch.Tensor, torch.Tensor]]:
    """Sum gradients that are still this rank's own, and return their norms.

    Args:
        rows: DDP, number of the parameter, and the parameter.
    """
    with torch.no_grad():
        given = [(wrapper, key, grad) for wrapper, key, parameter in rows if (grad := parameter.grad) is not None]
        if not (alike := internals.are_alike([grad for _, _, grad in given])):
            given = [(wrapper, key, grad) for wrapper, key, grad in given if _summable(grad)]
        grads = [grad for _, _, grad in given]
        norms = _norms_of_alike(grads) if alike else norms_of(grads)
        noted, step = since.parts[GradientSums].local, since.number
        for (wrapper, key, grad), norm in zip(given, norms, strict=True):
            noted[key] = (sum_of(grad) if wrapper.sums(key, step) else None, norm)
    return [(*row, norm) for row, norm in zip(given, norms, strict=True)]


def note_reduced(since: SinceLastStep, wrapper: Wrapper) -> None:
    """Sum and fingerprint the gradients after DDP has reduced them."""
    ddp = wrapper.ref()
    if ddp is None:
        return
    trainable, step = wrapper.trainable, since.number
    with torch.no_grad():
        rows = [(id(p), p.grad) for p in internals.parameters(ddp.module) if p.grad is not None and id(p) in trainable]
        if not (alike := internals.are_alike([grad for _, grad in rows])):
            rows = [(number, grad) for number, grad in rows if _summable(grad)]
        grads = [grad for _, grad in rows]
        norms = _norms_of_alike(grads) if alike else norms_of(grads)
        if False not in {grad.is_cpu for grad in grads}:
            digests = fingerprint.fingerprints(grads)
        else:
            digests = [fingerprint.fingerprint(grad) if grad.is_cpu else 0 for grad in grads]
        noted = since.parts[GradientSums].reduced
        for (number, grad), digest, norm in zip(rows, digests, norms, strict=True):
            glance = digest if not digest or grad.nbytes <= fingerprint.GLANCE_BYTES else fingerprint.glance(grad)
            total = sum_of(grad) if wrapper.sums(number, step) else None
            key = (id(grad), grad.data_ptr(), internals.version_of(grad), glance)
            noted[number] = Reduced(total, norm, digest, key)


def digests_at_step(
    sums: GradientSums, parameters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> tuple[device.Later, list[int], device.LaterFloats]:
    """Fingerprint the gradients at the optimizer step; return also those changed since reduction, and their norms.

    Those that nobody has touched since the reduction are not read again: same object, memory and version, and the same
    glance, which sees dense edits through `.data` that leave no other trace.
    """
    known: dict[int, int] = {}
    rest: list[tuple[int, torch.Tensor]] = []
    for position, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        if grad is None:
            known[position] = 0
            continue
        reduced = sums.reduced.get(id(parameter))
        if reduced is not None and reduced.digest and _untouched(grad, reduced):
            known[position] = reduced.digest
        else:
            rest.append((position, grad))
    if not rest:
        values = list(known.values())
        return (lambda: values), [], list
    given = [grad for _, grad in rest]
    alike = internals.are_alike(given)
    dense = rest if alike else [(position, grad) for position, grad in rest if internals.is_plain(grad)]
    norms = device.numbers(_norms_of_alike(given) if alike else norms_of([grad for _, grad in dense]))
    later = device.digests(given)
    number, positions = len(parameters), [position for position, _ in rest]

    def read() -> list[int]:  # holds no gradient: the record that has it stays for hundreds of steps
        found = {**known, **dict(zip(positions, later(), strict=True))}
        return [found[position] for position in range(number)]

    return read, [position for position, _ in dense], norms


def _untouched(grad: torch.Tensor, reduced: Reduced) -> bool:
    identity = (id(grad), grad.data_ptr(), internals.version_of(grad))
    return identity == reduced.key[:3] and fingerprint.glance(grad) == reduced.key[3]


def norms_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `norm_of` each tensor; one call for tensors that are alike, a few launches for those on a device."""
    if internals.are_alike(tensors):
        return _norms_of_alike(tensors)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if _is_one_of_many(tensor):
            together.setdefault((tensor.device, tensor.dtype), []).append(i)
    found: dict[int, torch.Tensor] = {}
    for (_, dtype), some in together.items():
        norms = internals.norms_there([tensors[i].detach() for i in some], _norm_dtype(dtype))
        found.update(zip(some, norms, strict=True))
    return [found[i] if i in found else norm_of(tensor) for i, tensor in enumerate(tensors)]


def _norms_of_alike(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(internals.norms_there(tensors, tensors[0].dtype))


def _is_one_of_many(tensor: torch.Tensor) -> bool:
    """Whether torch takes the norm of a tensor with those of others; one that it cannot slows down all of them."""
    if tensor.device.type == "cpu" or not _summable(tensor) or _is_gone(tensor):
        return False
    if not 0 < tensor.numel() <= _MOST_ELEMENTS:
        return False
    channels_last = _CHANNELS_LAST.get(tensor.dim())
    is_last = channels_last is not None and tensor.is_contiguous(memory_format=channels_last)
    return is_last or tensor.is_contiguous()


def norm_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of any tensor as a zero-dimensional tensor; of complex numbers that of their magnitudes.

    What has no elements to read has the norm 0.
    """
    if not internals.is_plain(tensor) or _is_gone(tensor):
        return torch.zeros((), device="cpu" if tensor.is_meta else tensor.device)
    dense = tensor.detach()
    if dense.is_complex():
        return _norm(torch.view_as_real(dense.resolve_conj()))
    return _norm(dense if dense.is_floating_point() else dense.to(torch.float64))


def _is_gone(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a plain tensor was freed under it, which torch's operations do not notice."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _summable(grad: torch.Tensor) -> bool:
    return grad.is_floating_point() and internals.is_plain(grad)


def _norm(grad: torch.Tensor) -> torch.Tensor:
    return internals.unlisted(torch.linalg.vector_norm(grad, dtype=_norm_dtype(grad.dtype)))


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_of(grad: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the sum over the elements of a gradient, or over one of its dimensions, in 32 bits or more."""
    return internals.unlisted(grad.sum(dim, dtype=grad.dtype if grad.dtype in _EXACT else torch.float32))
