"""Readers of values: losses, bytes and fingerprints of tensors, random state, precision."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.probes import async_copy as device
from ddpdebug.schema.announcements import Precision


def loss_reader(loss: torch.Tensor, scale: torch.Tensor | None) -> Callable[[], float]:
    """Return a function that gives the unscaled loss; on the CPU the loss is read now, before it may change.

    Under a scale that has fallen to 0 it is 0 or NaN, which tells whether the loss is finite, and nothing else.
    """
    read = device.numbers([loss] if scale is None else [loss, scale])

    def unscaled() -> float:
        value, *by = map(float, read())
        return value / by[0] if by and by[0] else value

    if loss.device.type == "cpu":
        known = unscaled()
        return lambda: known
    return unscaled


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the memory of a CPU tensor in logical order."""
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""


def rng_digest() -> int:
    """Fingerprint the state of the CPU generator without drawing from it."""
    return fingerprint.fingerprint(torch.default_generator.get_state())


def precision(module: torch.nn.Module) -> Precision:
    """Return the precision in which a forward of this module would run now."""
    kind = next(iter([p.device.type for p in internals.parameters(module)]), "cpu")
    enabled = torch.is_autocast_enabled(kind)
    return Precision(
        autocast=str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if enabled else None,
        matmul=torch.get_float32_matmul_precision() if kind == "cuda" else None,
    )
