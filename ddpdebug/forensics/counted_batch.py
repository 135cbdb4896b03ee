"""How the inputs of a forward are counted: which dimension is of samples, and which of positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.nested import leaves
from ddpdebug.probes.forward_capture import ForwardCapture

#: Samples of a batch, so that some are kept and others replaced.
LEAST = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """How a forward's inputs are counted: `size` samples in the first dimension, `length` positions in the second."""

    size: int
    length: int  # 0: no positions
    certain: bool  # the first dimension counts samples


def batch_of(capture: ForwardCapture, loaded: int | None) -> Batch | None:
    """Return how the inputs of a forward are counted; None where nothing can be said.

    Args:
        loaded: samples of a batch of the loader that is read.
    """
    tensors: list[torch.Tensor] = []
    for _, value in leaves((capture.args, capture.kwargs)):
        if is_a(value, torch.Tensor):
            if not internals.is_plain(value) or value.device.type != "cpu" or not internals.is_readable_memory(value):
                return None
            tensors.append(value)
        elif not (value is None or type(value) in {bool, int, float, str}):
            return None  # a graph, or something else with a structure of its own
    shapes = [tuple(tensor.shape) for tensor in tensors]
    first = next(iter([shape for shape in shapes if len(shape) > 1]), None)
    if first is None or first[0] < LEAST:
        return None
    words = len(first) == 2 and not any([t.is_floating_point() for t in tensors if t.shape == first])
    size, length = first[0], first[1] if len(first) == 3 or words else 0
    for shape in shapes:
        if shape.count(size) > 1:  # each with each: the edges of a graph
            return None
        if shape and shape[0] != size and not set(shape) <= {1, length}:  # else it belongs to all alike, like a mask
            return None
    features = len(first) == 2 and not words and not _knows_order(capture)
    return Batch(size, length, certain=size != length and (loaded == size or len(first) > 3 or features))


def _knows_order(capture: ForwardCapture) -> bool:
    """Return whether a module takes one sequence, without a dimension for samples, as well as a batch of them."""
    module = capture.module()
    parts = [] if module is None else internals.modules(module)
    kinds = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return any([isinstance(part, kinds) for part in parts])
