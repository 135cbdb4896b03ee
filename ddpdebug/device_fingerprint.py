"""Fingerprints of tensors on a device, computed there without waiting for it.

The sum, modulo 2**64, of a tensor's words times odd weights that depend on the position. On CUDA with Triton that is
one launch over all tensors, bound by the memory's bandwidth: each block adds the sum of one tile to its tensor's slot,
and sums of integers do not depend on the order of the blocks. Elsewhere the same numbers come from operations of torch,
several for each tensor.

Not run on a GPU yet: docs/gpu.md. The kernel has run in Triton's interpreter.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpdebug.fingerprint import CHUNK_WORDS, MASK, signed, weights_of, words_of

#: Words of one tile. A chunk of the weights is a whole number of tiles, so that a tile has one chunk's weight.
TILE = 4096
_LENGTH_WEIGHT, _CHUNK_WEIGHT = 0xE7037ED1A0B428DB, 0xA0761D6478BD642F
#: Tables that stay on the device: of the parameters, the gradients and the state of a few optimizers.
_KEPT = 8

#: Adds the weighted sum of each tile to the slot of its tensor: `triton_kernels.launch`.
Launch = Callable[[Tensor, Tensor, Tensor, int, int], None]


class Table(NamedTuple):
    """Where the tensors' words are, on their device.

    Args:
        places: a row for each tensor, int64: address, number of words, bytes of a word, number of its first tile.
        tensor_of: the row of each tile, int32.
        begun: what each sum begins with, int64: its length in words plus one, times an odd number.
    """

    places: Tensor
    tensor_of: Tensor
    begun: Tensor


def device_fingerprints(
    tensors: Sequence[Tensor], is_anothers: Callable[[Exception], bool] = lambda _: False
) -> Tensor:
    """Return one int64 fingerprint per tensor, on the tensors' device, without waiting for it. Works on the CPU too.

    The values are not those of `fingerprint`: compare like with like. All tensors are dense and on one device. A sum
    that happens to be 0 is left so: to replace it there would be two more launches.

    Args:
        is_anothers: tells of an exception that it has only come while the kernel was being loaded or launched. Others
            give the kernel up, for the rest of the process.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    with torch.no_grad():
        if not tensors[0].is_cuda or _KERNEL.given_up:
            return by_torch(tensors)
        blocks = [words_of(tensor) for tensor in tensors if tensor.is_contiguous()]
        try:
            launch = _launch()
            sums = fused(blocks, launch) if launch is not None and blocks else torch.empty(0)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or is_anothers(error):
                raise
            _KERNEL.given_up, launch = True, None
        if launch is None:
            return by_torch(tensors)
        if len(blocks) == len(tensors):
            return sums
        known = iter(sums.unbind())
        return torch.stack([next(known) if tensor.is_contiguous() else by_torch([tensor])[0] for tensor in tensors])


def by_torch(tensors: Sequence[Tensor]) -> Tensor:
    """Return the same sums by operations of torch: one copy at a time of tensors that are no block of memory."""
    most = max(tensor.nbytes // min(tensor.itemsize, 4) for tensor in tensors)
    weights = weights_of(min(most, CHUNK_WORDS), tensors[0].device)
    return torch.stack([_weighted_sum(words_of(tensor), weights) for tensor in tensors])


def fused(words: Sequence[Tensor], launch: Launch) -> Tensor:
    """Return the same sums by one launch: a copy of what they begin with, to which the kernel adds."""
    device = words[0].device
    # a table is copied on one stream: another one does not wait for that
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, *((flat.data_ptr(), len(flat), flat.itemsize) for flat in words))
    table = _TABLES.get(key)
    if table is None:
        table = _TABLES[key] = table_of(words)
        while len(_TABLES) > _KEPT:
            _TABLES.popitem(last=False)
    _TABLES.move_to_end(key)
    sums = table.begun.clone()
    if len(table.tensor_of):
        launch(table.places, table.tensor_of, sums, CHUNK_WORDS, TILE)
    return sums


_TABLES: OrderedDict[tuple[Any, ...], Table] = OrderedDict()


def table_of(words: Sequence[Tensor]) -> Table:
    """Return where flat tensors of words are, copied to their device from pinned memory, without waiting."""
    rows, tiles, begun = [], [], []
    first = 0
    for flat in words:
        number = -(-len(flat) // TILE)
        rows.append((flat.data_ptr(), len(flat), flat.itemsize, first))
        tiles.append(number)
        begun.append(_begun(flat))
        first += number
    there = torch.repeat_interleave(torch.arange(len(words), dtype=torch.int32), torch.tensor(tiles))
    host = (torch.tensor(rows, dtype=torch.int64), there, torch.tensor(begun, dtype=torch.int64))
    device = words[0].device
    if device.type == "cpu":
        return Table(*host)
    return Table(*(part.pin_memory().to(device, non_blocking=True) for part in host))


def _begun(words: Tensor) -> int:
    return signed((len(words) + 1) * _LENGTH_WEIGHT & MASK)  # not 0 where there is no word, or only zeros


def _weighted_sum(words: Tensor, weights: Tensor) -> Tensor:
    total = torch.full((), _begun(words), dtype=torch.int64, device=words.device)
    for number, part in enumerate(torch.split(words, max(1, len(weights)))):
        chunk_weight = signed((2 * number + 1) * _CHUNK_WEIGHT & MASK) | 1
        total += (part * weights[: len(part)]).sum() * chunk_weight
    return total


def forget_tables() -> None:
    """Give back the memory of the tables that are kept on devices."""
    _TABLES.clear()


class _Kernel:
    """Whether the kernel has failed: Triton compiles it at its first launch, and for that wants a C compiler."""

    given_up = False


_KERNEL = _Kernel()


@functools.cache
def _launch() -> Launch | None:
    """Return the kernel's launch; None where Triton is not there."""
    try:
        from ddpdebug.triton_kernels import launch  # noqa: PLC0415 - loads Triton, which a job on CPUs does not need
    except ImportError:
        return None
    return launch
