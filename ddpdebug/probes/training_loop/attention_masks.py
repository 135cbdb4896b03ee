"""Masks of zeros and ones given to `scaled_dot_product_attention`, which adds them, so that they hide nothing.

Read from the graph of a forward: fused attention keeps its mask there. Truth values have become 0 and minus infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ddpdebug.schema.announcements import AddedMask
from ddpdebug.torch_internals import graph, is_plain

_MAX_NODES, _MAX_ELEMENTS = 20_000, 1 << 20
_FUSED, _KEPT_AS = "ScaledDotProduct", ("attn_mask", "attn_bias")


def added_masks(outputs: Sequence[torch.Tensor]) -> Iterator[AddedMask]:
    """Yield the first such mask of a forward, if it is in host memory."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.pop()
        if graph.name_of(node).startswith(_FUSED):
            for mask in (graph.saved_tensor(node, name) for name in _KEPT_AS):
                if mask is not None and _is_zeros_and_ones(mask):
                    yield AddedMask(shape=tuple(mask.shape), zeros=float((mask == 0).double().mean()))
                    return
        below = [inner for inner, _ in node.next_functions if inner is not None and inner not in seen]
        seen.update(below)
        waiting += below


def _is_zeros_and_ones(mask: torch.Tensor) -> bool:
    """Whether a mask of zeros and ones is one of padding, the same for each query, or of order; others are a bias."""
    known = is_plain(mask) and mask.device.type == "cpu" and mask.is_floating_point()
    if not known or not 0 < mask.numel() <= _MAX_ELEMENTS:
        return False
    ones = mask == 1
    if not bool(ones.any()) or bool(ones.all()) or not bool((ones | (mask == 0)).all()) or mask.dim() < 2:
        return False
    padding = bool((ones == ones[..., :1, :]).all())
    return padding or torch.equal(ones, ones.tril()) or torch.equal(ones, ones.triu())
