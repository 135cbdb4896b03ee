"""Ranges of tensors: one pass at memory speed, which also shows whether all elements are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ddpdebug import torch_internals as internals

NAN, INF, MINUS_INF = "NaN", "+Inf", "-Inf"
_MAX_SAMPLES = 32
_HALVES = frozenset({torch.float16, torch.bfloat16})
_WHOLE = frozenset({torch.float32, torch.float64})


#: So many elements at once are converted, or have masks made of them: a tensor may have as much memory as there is.
_PIECE = 1 << 19
#: A converted copy of more elements is not made as a whole.
_MOST_COPIED = 1 << 20


def real_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the elements as comparable real floating-point numbers; None where they were a large copy."""
    own = _own(tensor)
    return None if own is None or (own.numel() > _MOST_COPIED and _is_converted(own)) else _real(own)


def has_numbers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has floating-point numbers to read."""
    return _own(tensor) is not None


def _own(tensor: torch.Tensor) -> torch.Tensor | None:
    if not internals.is_plain(tensor):
        return None
    own = internals.detached(tensor)
    return own if (own.is_floating_point() or own.is_complex()) and own.numel() else None


def _is_converted(own: torch.Tensor) -> bool:
    return own.dtype.itemsize == 1 or own.is_conj()


def _real(own: torch.Tensor) -> torch.Tensor:
    if own.is_complex():
        own = torch.view_as_real(own.resolve_conj())
    return own.to(torch.float32) if own.dtype.itemsize == 1 else own  # float8 can be stored and converted, little else


def _pieces(tensor: torch.Tensor, *, whole: bool = False, dim: int | None = None) -> Sequence[torch.Tensor]:
    """Return views of a tensor's elements, for `_real`; none if there are none to read.

    Args:
        whole: of what needs no conversion a single one.
        dim: the dimension that is cut, by default the longest.
    """
    own = _own(tensor)
    if own is None:
        return ()
    own = _once(own)
    if own.numel() <= _PIECE or (whole and not _is_converted(own)):
        return (own,)
    sizes = list(own.shape)
    dim = sizes.index(max(sizes)) if dim is None else dim
    return list(torch.split(own, max(1, _PIECE * sizes[dim] // own.numel()), dim))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return an expanded tensor's elements without their repetitions, of which torch would make a copy each."""
    if 0 in tensor.stride():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def look(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the least and the largest element, NaN if there is one; cannot overflow as a sum can."""
    own = _own(tensor)
    if own is not None and own.dtype.itemsize == 1:
        return _ends_of_bits(own)
    ends: tuple[torch.Tensor, torch.Tensor] | None = None
    for piece in _pieces(tensor, whole=True):  # numbers of many would keep the heap from using the pieces' room again
        low, high = torch.aminmax(_real(piece))
        ends = (low, high) if ends is None else (torch.minimum(ends[0], low), torch.maximum(ends[1], high))
    return None if ends is None else (internals.unlisted(ends[0]), internals.unlisted(ends[1]))


def _ends_of_bits(own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same of float8, without a conversion of each element.

    As integers, with a sign or without, the ends of either sign and each kind of NaN are ends as well.
    """
    bits = [end.view(torch.uint8) for kind in (torch.uint8, torch.int8) for end in torch.aminmax(_once(own).view(kind))]
    low, high = torch.aminmax(torch.stack(bits).view(own.dtype).to(torch.float32))
    return internals.unlisted(low), internals.unlisted(high)


def is_surely_finite(tensor: torch.Tensor) -> bool:
    """Return whether the sum is finite, in less than half the time of a range; a sum that overflows proves nothing."""
    if type(tensor) is torch.Tensor and tensor.dtype in _WHOLE and internals.is_plain(tensor):
        return math.isfinite(float(_once(tensor.detach()).sum()))
    if tensor.dtype.itemsize == 1:
        return all([math.isfinite(end) for end in read(tensor) or ()])
    return all([math.isfinite(float(_real(piece).sum())) for piece in _pieces(tensor, whole=True)])


def read(tensor: torch.Tensor) -> tuple[float, float] | None:
    """Return the range as numbers; waits for a device."""
    seen = look(tensor)
    return None if seen is None else (float(seen[0]), float(seen[1]))


def kinds_of(low: float, high: float) -> list[str]:
    """Return the kinds of non-finite values that a tensor with this range certainly contains."""
    if math.isnan(low) or math.isnan(high):
        return [NAN]
    return [name for name, there in ((INF, high == math.inf), (MINUS_INF, low == -math.inf)) if there]


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Count the non-finite elements and return the range of the others; takes several passes and waits for a device."""
    found = [_described(_real(piece)) for piece in _pieces(tensor)]
    spans = [span for _, _, span in found if span is not None]
    return {
        "kinds": tuple([name for name in (NAN, INF, MINUS_INF) if any([name in kinds for kinds, _, _ in found])]),
        "count": sum([count for _, count, _ in found]),
        "range": (min([low for low, _ in spans]), max([high for _, high in spans])) if spans else None,
        "dtype": dtype_name(tensor),
        "shape": tuple(tensor.shape),
    }


def _described(own: torch.Tensor) -> tuple[Sequence[str], int, tuple[float, float] | None]:
    finite = torch.isfinite(own)
    rest = own[finite]
    there = ((NAN, own.isnan()), (INF, own == math.inf), (MINUS_INF, own == -math.inf))
    span = (float(rest.min()), float(rest.max())) if rest.numel() else None
    return [name for name, mask in there if bool(mask.any())], own.numel() - rest.numel(), span


def samples(tensor: torch.Tensor) -> list[int]:
    """Return the first indices along dimension 0 with a non-finite element."""
    if tensor.dim() == 0:
        return []
    found: list[int] = []
    start = 0
    for piece in _pieces(tensor, dim=0):
        bad = ~torch.isfinite(_real(piece)).reshape(len(piece), -1).all(1)
        found += [start + i for i in bad.nonzero().flatten().tolist()]
        start += len(piece)
    return found[:_MAX_SAMPLES]


def is_additive_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds nothing but 0 and -Inf, as an attention mask does."""
    found = [_is_additive_mask(_real(piece)) for piece in _pieces(tensor)]
    return bool(found) and all(found)


def _is_additive_mask(own: torch.Tensor) -> bool:
    return bool(((own == 0) | (own == -math.inf)).all())


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of the dtype without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def near_limit(dtype: torch.dtype, low: float, high: float) -> float | None:
    """Return the largest magnitude if it is within a factor of two of a 16-bit dtype's limit.

    Negative values count only beside positive ones of some size: constants such as -65504 or -5e4 that masks are made
    of are no sign of growth, and come with scores around 0.
    """
    if dtype not in _HALVES or not (math.isfinite(low) and math.isfinite(high)):
        return None
    limit = torch.finfo(dtype).max
    largest = max(high, -low) if high >= -low / 8 else max(high, 0.0)
    return largest if largest > limit / 2 else None


def nonfinite(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of tensors with non-finite elements: by norm and, if that is not finite, by range."""
    if internals.are_alike(tensors):
        with torch.no_grad():
            norms = internals.norms([_once(tensor) for tensor in tensors])
        if all(map(math.isfinite, norms)):
            return []
    dense = [(i, internals.detached(t)) for i, t in enumerate(tensors) if internals.is_plain(t)]
    plain = [(i, t) for i, t in dense if t.is_floating_point() and t.numel() and t.dtype.itemsize > 1]
    if not plain:
        return []
    norms = internals.norms([_once(t) for _, t in plain])
    suspects = [(i, t) for (i, t), norm in zip(plain, norms, strict=True) if not math.isfinite(norm)]
    return [i for i, t in suspects if (seen := read(t)) is not None and not all(map(math.isfinite, seen))]
