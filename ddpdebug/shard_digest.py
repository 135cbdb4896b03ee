"""64-bit tensor digests that do not depend on the sharding: those of all shards add up to that of the whole tensor.

The digest of a tensor is the sum of `bits * weight` over its elements, modulo 2**64: the bits are those of the element
as an integer (-0.0 is not 0.0, NaN payloads count), the weight is a pseudorandom number of 64 bits that depends on the
element's place in the whole tensor alone, counted in row-major order. A shard knows its places from its offset and the
shape of the whole, so it is enough to add. Shape and dtype are no part of it: whoever compares digests compares those.

One changed element always changes the digest, and so do two of up to four bytes that change places within the same
65,536: there no two weights have the same lower 32 bits, so that the sum changes by a product that 2**64 does not
divide. Any other change goes unseen by chance alone, at worst about once in 2**33 (where the bits differ in the highest
only), else once in 2**64. An empty tensor has the digest 0, and so has one in which all bits are 0.

The device of the tensor is not waited for; at most `CHUNK_BYTES` of temporary memory are in use there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ddpdebug.device_fingerprint import weights_of
from ddpdebug.errors import UsageError
from ddpdebug.fingerprint import MASK, has_data, integers_of, mixed
from ddpdebug.torch_internals import as_plain

#: What is taken of the memory of a tensor's device beside it.
CHUNK_BYTES = 4 << 20
#: Places after which the weights repeat, but for a factor: a power of two.
_PERIOD = 1 << 16
_BITS = _PERIOD.bit_length() - 1
#: So many times as many words are multiplied at once.
_ROWS = CHUNK_BYTES // (16 * _PERIOD)
#: Words by themselves: each needs its place, two weights and what they are made of.
_SCATTERED = CHUNK_BYTES // 64


def shard_digest(shard: Tensor, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
    """Return the digest of a shard, a zero-dimensional int64 tensor on its device; digests add up modulo 2**64.

    Args:
        shard: a dense tensor; its strides do not matter.
        offset: the place of its first element in the whole tensor, a number for each dimension; by default the origin.
        shape: the shape of the whole tensor; by default that of the shard.

    Raises:
        UsageError: the tensor has no data (meta, freed), is not dense, or does not lie within the shape.
    """
    whole = tuple(shard.shape) if shape is None else tuple(shape)
    first = (0,) * len(whole) if offset is None else tuple(offset)
    if len(whole) != shard.dim() or len(first) != shard.dim() or not _lies_within(shard.shape, first, whole):
        raise UsageError(f"a shard {tuple(shard.shape)} at {first} does not lie within a tensor {whole}")
    if shard.layout is not torch.strided or shard.is_nested or shard.is_quantized:
        raise UsageError("the tensor is sparse, nested or quantized; digests are made of dense tensors")
    with torch.no_grad(), as_plain():
        if shard.numel() == 0:
            return torch.zeros((), dtype=torch.int64, device=shard.device)
        if not has_data(shard):
            raise UsageError("the tensor has no data: it is on the meta device, or its memory has been freed")
        words = words_in(shard)
        strides, step = [0] * shard.dim(), words[(0,) * shard.dim()].numel()
        for dim in reversed(range(shard.dim())):
            strides[dim], step = step, step * whole[dim]
        start = sum(place * stride for place, stride in zip(first, strides, strict=True))
        inner = words.shape[shard.dim() :]
        return _sum(words, start, [*strides, *(math.prod(inner[i + 1 :]) for i in range(len(inner)))])


def digest_number(digest: int) -> int:
    """Return a digest as an unsigned 64-bit number, from a signed one or from a sum of them."""
    return digest & MASK


def words_in(tensor: Tensor) -> Tensor:
    """View a tensor's elements as integers of at most 32 bits; larger elements get further dimensions."""
    found = integers_of(tensor)
    if found.is_floating_point():  # of complex numbers of 16 bytes
        found = found.view(torch.int64)
    return found.unsqueeze(-1).view(torch.int32) if found.itemsize == 8 else found


def _lies_within(size: Sequence[int], first: Sequence[int], whole: Sequence[int]) -> bool:
    return all([0 <= place <= place + n <= most for place, n, most in zip(first, size, whole, strict=True)])


def _sum(words: Tensor, start: int, strides: Sequence[int]) -> Tensor:
    """Return the sum over words of which the first stands at `start`, and the next along a dimension `stride` on."""
    shape = words.shape
    if words.is_contiguous() and all(
        [
            n == 1 or stride == math.prod(shape[i + 1 :])
            for i, (n, stride) in enumerate(zip(shape, strides, strict=True))
        ]
    ):
        return _sum_of_run(words.view(-1), start)
    if words.numel() <= _SCATTERED:
        return _sum_of_scattered(words, start, strides)
    dim = next(i for i, n in enumerate(shape) if n > 1)
    half = shape[dim] // 2
    return _sum(words.narrow(dim, 0, half), start, strides) + _sum(
        words.narrow(dim, half, shape[dim] - half), start + half * strides[dim], strides
    )


def _sum_of_run(words: Tensor, start: int) -> Tensor:
    """Return the sum over words whose places follow one another."""
    table = _table(words.device)
    begin, total = 0, torch.zeros((), dtype=torch.int64, device=words.device)
    products = table.new_empty(min(len(words), _ROWS * _PERIOD))  # kept: on the CPU new memory costs more than the rest
    while begin < len(words):
        place = (start + begin) % _PERIOD
        rows = min(_ROWS, (len(words) - begin) // _PERIOD) if place == 0 else 0
        length = rows * _PERIOD or min(_PERIOD - place, len(words) - begin)
        piece = words[begin : begin + length].view(rows or 1, -1)
        weighted = products[:length].view(piece.shape)
        weighted.copy_(piece)  # by itself: a product of two dtypes makes a copy in new memory
        weighted *= table[place : place + piece.shape[1]]
        sums = weighted.sum(1)
        number = (start + begin) >> _BITS
        total += (sums * _factors(torch.arange(number, number + len(sums), device=words.device))).sum()
        begin += length
    return total


def _sum_of_scattered(words: Tensor, start: int, strides: Sequence[int]) -> Tensor:
    """Return the sum over words anywhere."""
    places = torch.full((), start, dtype=torch.int64, device=words.device)
    for dim, (n, stride) in enumerate(zip(words.shape, strides, strict=True)):
        along = torch.arange(n, device=words.device) * stride
        places = places + along.view(-1, *(1,) * (words.dim() - dim - 1))
    weights = _table(words.device)[places & (_PERIOD - 1)]
    weights *= _factors(places >> _BITS)
    weights *= words
    return weights.sum()


def _factors(numbers: Tensor) -> Tensor:
    return mixed(numbers + 1) | 1


@functools.lru_cache(maxsize=16)
def _table(device: torch.device) -> Tensor:
    """Return the weights of the places of one period."""
    upper = mixed(torch.arange(_PERIOD, dtype=torch.int64, device=device))
    return upper << 32 | weights_of(_PERIOD, device) & 0xFFFFFFFF
