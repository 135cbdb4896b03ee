"""The Triton kernel of `device_fingerprint`: the weighted sums of all tensors' words in one launch."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddpdebug.fingerprint import signed

_MIX_1: tl.constexpr = tl.constexpr(signed(0x9E3779B97F4A7C15))
_MIX_2: tl.constexpr = tl.constexpr(signed(0xD6E8FEB86659FD93))
_CHUNK_WEIGHT: tl.constexpr = tl.constexpr(signed(0xA0761D6478BD642F))


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no annotations
def _add_tiles(places, tensor_of, sums, chunk_words: tl.constexpr, tile_words: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    tile = tl.program_id(0).to(tl.int64)
    tensor = tl.load(tensor_of + tile).to(tl.int64)
    row = places + 4 * tensor
    address = tl.load(row)
    count = tl.load(row + 1)
    size = tl.load(row + 2)
    place = (tile - tl.load(row + 3)) * tile_words + tl.arange(0, tile_words).to(tl.int64)
    mask = place < count
    if size == 4:
        words = tl.load(address.to(tl.pointer_type(tl.int32)) + place, mask=mask, other=0).to(tl.int64)
    elif size == 2:
        words = tl.load(address.to(tl.pointer_type(tl.int16)) + place, mask=mask, other=0).to(tl.int64)
    else:
        words = tl.load(address.to(tl.pointer_type(tl.int8)) + place, mask=mask, other=0).to(tl.int64)
    # `fingerprint.mixed` of the position in its chunk; shifts of signed numbers, as torch's are
    weight = (place % chunk_words + 1) * _MIX_1
    weight ^= weight >> 32
    weight *= _MIX_2
    weight = (weight ^ (weight >> 29)) | 1
    chunk_weight = ((2 * (place // chunk_words) + 1) * _CHUNK_WEIGHT) | 1
    tl.atomic_add(sums + tensor, tl.sum(words * weight * chunk_weight, axis=0), sem="relaxed")


def launch(places: Tensor, tensor_of: Tensor, sums: Tensor, chunk_words: int, tile_words: int) -> None:
    """Add the weighted sum of each tile to the slot of its tensor, on the current stream of the tensors' device.

    Args:
        places: a row for each tensor, int64: address, number of words, bytes of a word, number of its first tile.
        tensor_of: the row of each tile, int32.
        sums: a slot for each tensor, int64.
        chunk_words: words after which the weights repeat, a multiple of `tile_words`, which is a power of two.
    """
    with torch.cuda.device(sums.device) if sums.is_cuda else nullcontext():  # else Triton's interpreter
        _add_tiles[(len(tensor_of),)](places, tensor_of, sums, chunk_words, tile_words)
