"""Digests and comparisons of the tensors of a running program: the weights of a trainer and of its rollout engine."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpdebug.checkpoints.comparison import compare
from ddpdebug.checkpoints.entries import Piece, State, TensorEntry, flat, whole
from ddpdebug.checkpoints.files import open_state
from ddpdebug.checkpoints.outcome import StateComparison
from ddpdebug.errors import UsageError
from ddpdebug.isolation.foreign import is_a
from ddpdebug.shard_digest import digest_number, shard_digest


def digests_of(named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return a 64-bit digest of each tensor, by name: the same for every sharding and on every device.

    ```python
    digests = ddpdebug.digests_of(model.named_parameters())
    ```

    Digests of two tensors of the same shape and dtype are equal when all elements are, bit by bit (-0.0 is not 0.0, NaN
    payloads count), so those of a trainer can be compared with those of another process: `a == b`. Shape and dtype are
    no part of them. Numbers are from 0 to 2**64 - 1.

    For tensors that are sharded (DTensor, so FSDP2 and tensor parallel) all ranks of their mesh must call this with the
    same names in the same order: it adds one number for each of them over the groups of the mesh, and all ranks return
    the digests of the whole tensors. Otherwise it does not communicate. A device is waited for once.

    Args:
        named_tensors: pairs of name and tensor, as `named_parameters()` returns, or a mapping, as `state_dict()` does.

    Raises:
        UsageError: a name comes twice, or a tensor has no digest: it has no data (meta), is sparse, nested or
            quantized, holds partial sums that nobody has reduced, or this rank is not in its mesh.
    """
    plain: dict[str, Tensor] = {}
    shares: dict[Any, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in _pairs(named_tensors):
        try:
            if _is_sharded(tensor):
                shares[_mesh(tensor)][name] = _share(tensor)
            else:
                plain[name] = shard_digest(tensor)
        except UsageError as error:
            raise UsageError(f"{name!r} has no digest: {error}") from None
    found: dict[str, int] = {}
    for mesh, parts in shares.items():
        total = torch.stack([parts[name] for name in sorted(parts)]).to(mesh.device_type)  # from where it is offloaded
        for dim in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dim))
        found.update(zip(sorted(parts), total.tolist(), strict=True))
    for device in {digest.device for digest in plain.values()}:
        parts = {name: digest for name, digest in plain.items() if digest.device == device}
        found.update(zip(parts, torch.stack([*parts.values()]).tolist(), strict=True))
    return {name: digest_number(number) for name, number in found.items()}


def compare_states(a: Any, b: Any, *, trust: bool = False) -> StateComparison:
    """Return the differences between two states, each live or a checkpoint; `str()` of the result is readable text.

    ```python
    found = ddpdebug.compare_states(model.state_dict(), "step-100/model.safetensors")
    assert found.equal, found
    ```

    A state is a path, as for `ddpdebug checkpoint compare`, a mapping that may be nested, or pairs of name and tensor.
    It does not communicate: of tensors that are sharded (DTensor), each rank compares the part that it has.

    Args:
        trust: unpickle what a file holds beside tensors and plain values, which may run any code.

    Raises:
        UsageError: a state cannot be read, or neither has an entry.
    """
    return compare(_state(a, "live A", trust=trust), _state(b, "live B", trust=trust))


def _state(given: Any, where: str, *, trust: bool) -> State:
    if is_a(given, str | os.PathLike):
        return open_state(Path(given), trust=trust)
    if not is_a(given, Mapping):
        given = dict(_pairs(given))
    return State(where, "in this process", flat(given, where, _entry))


def _entry(tensor: Tensor) -> TensorEntry:
    tensor = tensor.detach()
    if not _is_sharded(tensor):
        return whole(tensor)
    local, offset = _local(tensor)
    return TensorEntry(tuple(tensor.shape), tensor.dtype, (Piece(offset, tuple(local.shape), lambda: local),))


def _pairs(named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the pairs; raise UsageError where one is no pair of a new name and a tensor."""
    seen = set()
    pairs: Iterable[tuple[str, Tensor]] = named.items() if isinstance(named, Mapping) else named
    for name, tensor in pairs:
        if not is_a(tensor, Tensor):
            raise UsageError(f"{name!r} is no tensor but {type(tensor).__name__}; give pairs of name and tensor")
        if name in seen:
            raise UsageError(f"two tensors are called {name!r}")
        seen.add(name)
        yield name, tensor


def _is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh


def _share(tensor: Any) -> Tensor:
    """Return what this rank adds to the digest of a sharded tensor: of replicas the first alone adds."""
    local, offset = _local(tensor)
    places = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    if any([placement.is_replicate() and place for placement, place in places]):
        return torch.zeros((), dtype=torch.int64, device=local.device)
    return shard_digest(local, offset, tensor.shape)


def _local(tensor: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a sharded tensor, and its place in the whole."""
    if tensor.device_mesh.get_coordinate() is None:
        raise UsageError("this rank is not in its mesh; leave it out here")
    if any([placement.is_partial() for placement in tensor.placements]):
        raise UsageError("it holds partial sums; redistribute it first")
    chunks = tensor.__create_chunk_list__()
    with torch.no_grad():
        local = tensor.to_local()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise UsageError("its part on this rank is not one block of the whole")
    return local, tuple(chunks[0].offsets)
