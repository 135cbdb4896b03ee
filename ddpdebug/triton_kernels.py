"""The Triton kernel of `device_fingerprint`: the weighted sums of all tensors' words in one launch."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddpdebug.fingerprint import signed

_MIX_1: tl.constexpr = tl.constexpr(0x9E3779B1)
_MIX_2: tl.constexpr = tl.constexpr(0x85EBCA77)
_CHUNK_WEIGHT: tl.constexpr = tl.constexpr(signed(0xA0761D6478BD642F))
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no annotations
def _add_tiles(places, tensor_of, sums, chunk_words: tl.constexpr, tile_words: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of + tile)
    row = places + 4 * tensor
    address = tl.load(row)
    count = tl.load(row + 1)
    size = tl.load(row + 2)
    start = (tile - tl.load(row + 3)) * tile_words
    place = tl.arange(0, tile_words)
    left = tl.minimum(count - start, tile_words).to(tl.int32)
    if size == 0:
        aligned = tl.multiple_of((address + 4 * start).to(tl.pointer_type(tl.int32)), 16)
        if left == tile_words:  # noqa: SIM108 - without a mask each thread reads 16 bytes at once
            words = tl.load(aligned + place)
        else:
            words = tl.load(aligned + place, mask=place < left, other=0)
    elif size == 4:
        fours = (address + 4 * start).to(tl.pointer_type(tl.int32))
        words = tl.load(fours + place, mask=place < left, other=0)
    elif size == 2:
        twos = (address + 2 * start).to(tl.pointer_type(tl.int16))
        words = tl.load(twos + place, mask=place < left, other=0).to(tl.int32)
    else:
        ones = (address + start).to(tl.pointer_type(tl.int8))
        words = tl.load(ones + place, mask=place < left, other=0).to(tl.int32)
    # `device_fingerprint.weights_of` the position in its chunk
    weight = ((start % chunk_words).to(tl.int32) + place + 1).to(tl.uint32) * tl.full((), _MIX_1, tl.uint32)
    weight = (weight ^ (weight >> 15)) * tl.full((), _MIX_2, tl.uint32)
    weight = (weight ^ (weight >> 13)).to(tl.int32, bitcast=True)
    chunk_weight = ((2 * (start // chunk_words) + 1) * _CHUNK_WEIGHT) | 1
    total = tl.sum(words.to(tl.int64) * weight.to(tl.int64), axis=0) * chunk_weight
    tl.atomic_add(sums + tensor, total, sem="relaxed")


def launch(places: Tensor, tensor_of: Tensor, sums: Tensor, chunk_words: int, tile_words: int) -> None:
    """Add the weighted sum of each tile to the slot of its tensor, on the current stream of the tensors' device.

    Args:
        places: a row for each tensor, int64: address, number of words, bytes of a word (0: of 4, with an address that
            is a multiple of 16), number of its first tile.
        tensor_of: the row of each tile, int32.
        sums: a slot for each tensor, int64.
        chunk_words: words after which the weights repeat, a multiple of `tile_words`, which is a power of two.
    """
    with torch.cuda.device(sums.device) if sums.is_cuda else nullcontext():  # else Triton's interpreter
        _add_tiles[(len(tensor_of),)](places, tensor_of, sums, chunk_words, tile_words, num_warps=_WARPS)
