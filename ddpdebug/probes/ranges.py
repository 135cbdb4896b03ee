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


def real_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the elements as comparable real floating-point numbers; None if there are none to read."""
    if not internals.is_plain(tensor):
        return None
    own = internals.detached(tensor)
    if not (own.is_floating_point() or own.is_complex()) or not own.numel():
        return None
    if own.is_complex():
        own = torch.view_as_real(own.resolve_conj())
    if own.dtype.itemsize == 1:  # float8 can be stored and converted, little else
        own = own.to(torch.float32)
    return own


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return an expanded tensor's elements without their repetitions, of which torch would make a copy each."""
    if 0 in tensor.stride():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def look(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the least and the largest element, NaN if there is one; cannot overflow as a sum can."""
    own = real_view(tensor)
    if own is None:
        return None
    own = _once(own)
    low, high = torch.aminmax(own)
    return internals.unlisted(low), internals.unlisted(high)


def is_surely_finite(tensor: torch.Tensor) -> bool:
    """Return whether the sum is finite, in less than half the time of a range; a sum that overflows proves nothing."""
    if type(tensor) is torch.Tensor and tensor.dtype in _WHOLE and internals.is_plain(tensor):
        return math.isfinite(float(_once(tensor.detach()).sum()))
    own = real_view(tensor)
    return own is None or math.isfinite(float(_once(own).sum()))


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
    own = real_view(tensor)
    assert own is not None
    own = _once(own)
    finite = torch.isfinite(own)
    rest = own[finite]
    there = ((NAN, own.isnan()), (INF, own == math.inf), (MINUS_INF, own == -math.inf))
    return {
        "kinds": tuple([name for name, mask in there if bool(mask.any())]),
        "count": int(own.numel() - int(finite.sum())),
        "range": None if not rest.numel() else (float(rest.min()), float(rest.max())),
        "dtype": dtype_name(tensor),
        "shape": tuple(tensor.shape),
    }


def samples(tensor: torch.Tensor) -> list[int]:
    """Return the first indices along dimension 0 with a non-finite element."""
    own = real_view(tensor)
    if own is None or own.dim() == 0:
        return []
    own = _once(own)
    bad = ~torch.isfinite(own).reshape(own.shape[0], -1).all(1)
    return [int(i) for i in bad.nonzero().flatten()[:_MAX_SAMPLES]]


def is_additive_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds nothing but 0 and -Inf, as an attention mask does."""
    own = real_view(tensor)
    own = None if own is None else _once(own)
    return own is not None and bool(((own == 0) | (own == -math.inf)).all())


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
