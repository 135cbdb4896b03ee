"""Describes a tensor's values: range, zeros, non-finite values. Exact for every dtype; waits for the device."""

from __future__ import annotations

import math
from typing import Any

import torch

_NATIVE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def is_floating(value: object) -> bool:
    """Whether a value is a tensor that can hold NaN: on a device, dense, not quantised."""
    return (
        isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
        and value.device.type != "meta"
        and not value.is_quantized
    )


def extremes(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest element, both NaN if there is any NaN; (0, 0) for an empty tensor."""
    if tensor.numel() == 0:
        return 0.0, 0.0
    low, high = torch.aminmax(_real(tensor))
    return float(low), float(high)


def nonfinite(tensor: torch.Tensor) -> str | None:
    """Return "nan", "inf" (either sign, no NaN), or None for a tensor that is finite throughout."""
    low, high = extremes(tensor)
    if math.isnan(low) or math.isnan(high):
        return "nan"
    return "inf" if math.isinf(low) or math.isinf(high) else None


def described(tensor: torch.Tensor, *, counts: bool = True) -> dict[str, Any]:
    """Return dtype, shape, range of the finite elements and, if wanted, counts as a JSON value."""
    found: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "device": tensor.device.type,
    }
    if not is_floating(tensor) or tensor.numel() == 0:
        return found
    real = _real(tensor)
    low, high = (float(v) for v in torch.aminmax(real))
    if math.isfinite(low) and math.isfinite(high):
        found |= {"min": low, "max": high}
        if counts:
            found |= {"zeros": int((real == 0).sum()), "nan": 0, "inf": 0}
        return found
    finite = real.isfinite()
    kept = real[finite]
    if kept.numel():
        low, high = (float(v) for v in torch.aminmax(kept))
        found |= {"min": low, "max": high}
    nan = int(real.isnan().sum())
    found |= {"zeros": int((real == 0).sum()), "nan": nan, "inf": int(real.numel() - int(finite.sum()) - nan)}
    return found


def _real(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain if plain.dtype in _NATIVE else plain.to(torch.float32)
