"""Fingerprints of tensors on a device, computed there without waiting for it.

The sum, modulo 2**64, of a tensor's words times weights that depend on the position: both are signed integers of 32
bits, no two positions of a chunk have the same weight and none has 0. So one word that changes, by whatever, and two of
a chunk that change places are seen for certain: what they change in the sum is a product of less than 2**64. On CUDA
with Triton that is one launch over all tensors, bound by the memory's bandwidth: each block adds the sum of one tile to
its tensor's slot, and sums of integers do not depend on the order of the blocks. Elsewhere the same numbers come from
operations of torch, several for each tensor. docs/gpu.md has what was measured.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpdebug import devices
from ddpdebug.fingerprint import CHUNK_WORDS, MASK, NO_DATA, PLAIN, has_data, integers_of, signed
from ddpdebug.torch_internals import unlisted

#: Words of one tile. A chunk of the weights is a whole number of tiles, so that a tile has one chunk's weight.
TILE = 4096
_LENGTH_WEIGHT, _CHUNK_WEIGHT = 0xE7037ED1A0B428DB, 0xA0761D6478BD642F
_MIX_1, _MIX_2, _WORD_MASK = 0x9E3779B1, 0x85EBCA77, 0xFFFFFFFF
#: Of a tensor's address, in bytes, for the widest loads.
_ALIGNED = 16
#: Tables that stay on the device: of the parameters, the gradients and the state of a few optimizers.
_KEPT = 8

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

#: Adds the weighted sum of each tile to the slot of its tensor: `triton_kernels.launch`.
Launch = Callable[[Tensor, Tensor, Tensor, int, int], None]


class Table(NamedTuple):
    """Addresses and sizes of tensors for the kernel, as tensors on their device.

    Args:
        places: a row for each tensor, int64: address, number of words, bytes of a word (0: of 4, with an address that
            is a multiple of 16), number of its first tile.
        tensor_of: the row of each tile, int32.
        begun: what each sum begins with, int64: its length in bytes plus one, times an odd number.
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
        are_blocks = [_is_block(tensor) for tensor in tensors]
        blocks = [tensor for tensor, is_block in zip(tensors, are_blocks, strict=True) if is_block]
        try:
            launch = _launch()
            sums = fused(blocks, launch) if launch is not None and blocks else torch.empty(0)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or devices.failure.note(error) or is_anothers(error):
                raise
            _KERNEL.given_up, launch = True, None
        if launch is None:
            return by_torch(tensors)
        if len(blocks) == len(tensors):
            return sums
        known, pairs = iter(sums.unbind()), zip(tensors, are_blocks, strict=True)
        return torch.stack([next(known) if is_block else by_torch([tensor])[0] for tensor, is_block in pairs])


def by_torch(tensors: Sequence[Tensor]) -> Tensor:
    """Return the same sums by torch operators; non-contiguous tensors are copied one at a time."""
    most = max(tensor.nbytes // _word_bytes(tensor.nbytes) for tensor in tensors)
    weights = weights_of(min(most, CHUNK_WORDS), tensors[0].device)
    return torch.stack([_weighted_sum(tensor, weights) for tensor in tensors])


def fused(blocks: Sequence[Tensor], launch: Launch) -> Tensor:
    """Return the same sums of contiguous tensors by one kernel launch, which adds to a copy of the initial sums."""
    device = blocks[0].device
    # a table is copied on one stream: another one does not wait for that
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, *[(block.data_ptr(), block.nbytes) for block in blocks])
    table = _TABLES.get(key)
    if table is None:
        table = _TABLES[key] = table_of(blocks)
        while len(_TABLES) > _KEPT:
            _TABLES.popitem(last=False)
    _TABLES.move_to_end(key)
    sums = table.begun.clone()
    if len(table.tensor_of):
        launch(table.places, table.tensor_of, sums, CHUNK_WORDS, TILE)
    return sums


_TABLES: OrderedDict[tuple[Any, ...], Table] = OrderedDict()
devices.failure.when(functools.partial(devices.keep, _TABLES))


def table_of(blocks: Sequence[Tensor]) -> Table:
    """Return the table of contiguous tensors, copied to their device from pinned memory, without waiting."""
    rows, tiles, begun = [], [], []
    first = 0
    for block in blocks:
        size, address = _word_bytes(block.nbytes), block.data_ptr()
        number = block.nbytes // size
        rows.append((address, number, 0 if size == 4 and address % _ALIGNED == 0 else size, first))
        tiles.append(-(-number // TILE))
        begun.append(_begun(block.nbytes))
        first += tiles[-1]
    there = torch.repeat_interleave(torch.arange(len(blocks), dtype=torch.int32), torch.tensor(tiles))
    host = (torch.tensor(rows, dtype=torch.int64), there, torch.tensor(begun, dtype=torch.int64))
    device = blocks[0].device
    if device.type == "cpu":
        return Table(*map(unlisted, host))
    return Table(*(unlisted(devices.to_device(part, device)) for part in host))


def _word_bytes(size: int) -> int:
    """Return the bytes of a word of a tensor with so many: as many as divide it, so that ranks with the same agree."""
    return 4 if size % 4 == 0 else 2 if size % 2 == 0 else 1


def _is_block(tensor: Tensor) -> bool:
    """Whether a tensor's elements are one block of memory, of whole words that the device can load."""
    if type(tensor) not in PLAIN or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    size = tensor.nbytes
    if not size:
        return True
    address = tensor.data_ptr()  # 0 where FSDP has freed the memory, and the storage is then shorter
    fits = tensor.storage_offset() * tensor.itemsize + size <= tensor.untyped_storage().nbytes()
    return fits and address != 0 and address % _word_bytes(size) == 0


def _begun(size: int) -> int:
    return signed((size + 1) * _LENGTH_WEIGHT & MASK)  # not 0 where there is no word, or only zeros


def weights_of(count: int, device: torch.device) -> Tensor:
    """Return the weight of each position of a chunk as int64: its number from 1 on, mixed as the kernel does."""
    found = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MIX_1 & _WORD_MASK
    found = (found ^ (found >> 15)) * _MIX_2 & _WORD_MASK
    found ^= found >> 13
    return (found ^ 1 << 31) - (1 << 31)  # as signed integers of 32 bits


def _words_of(tensor: Tensor) -> Tensor:
    """View a tensor's memory as words, in logical order."""
    flat = integers_of(tensor).contiguous().reshape(-1)
    size = _word_bytes(flat.nbytes)
    if flat.data_ptr() % size or flat.storage_offset() * flat.itemsize % size or flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(_WORDS[size])


def _weighted_sum(tensor: Tensor, weights: Tensor) -> Tensor:
    if tensor.nbytes and not has_data(tensor):
        return torch.full((), signed(NO_DATA), dtype=torch.int64, device=weights.device)
    words = _words_of(tensor)
    total = torch.full((), _begun(words.nbytes), dtype=torch.int64, device=words.device)
    for number, part in enumerate(torch.split(words, max(1, len(weights)))):
        chunk_weight = signed((2 * number + 1) * _CHUNK_WEIGHT & MASK) | 1
        total += (part * weights[: len(part)]).sum() * chunk_weight
    return total


def forget_tables() -> None:
    """Release the device memory of cached tables."""
    _TABLES.clear()


class _Kernel:
    """Whether the kernel has failed: Triton compiles it at its first launch, and for that wants a C compiler."""

    given_up = False


_KERNEL = _Kernel()


@functools.cache
def _launch() -> Launch | None:
    """Return the kernel's launch; None where Triton is not there, or interprets, which reads addresses on the host."""
    if os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}:
        return None
    try:
        from ddpdebug.triton_kernels import launch  # noqa: PLC0415 - loads Triton, which a job on CPUs does not need
    except ImportError:
        return None
    return launch
