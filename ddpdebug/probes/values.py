"""Reading what passes by: losses, random state, tensors in nested structures."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.user_code import is_users
from ddpdebug.probes import async_copy as device
from ddpdebug.schema.announcements import Precision


def loss_reader(loss: torch.Tensor, scale: torch.Tensor | None) -> Callable[[], float]:
    """Return a function that gives the loss, unscaled; on the CPU it is read now, before anybody changes it."""
    read = device.numbers([loss] if scale is None else [loss, scale])
    if loss.device.type == "cpu":
        values = [float(v) for v in read()]
        return lambda: values[0] / values[1] if scale is not None else values[0]

    def later() -> float:
        numbers = read()
        return numbers[0] / numbers[1] if scale is not None else numbers[0]

    return later


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the memory of a CPU tensor in logical order."""
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""


def rng_digest() -> int:
    """Fingerprint the state of the CPU generator without drawing from it."""
    return fingerprint.fingerprint(torch.default_generator.get_state())


def precision(module: torch.nn.Module) -> Precision:
    """Say in which precision a forward of this module would run now."""
    kind = next((p.device.type for p in internals.parameters(module)), "cpu")
    enabled = torch.is_autocast_enabled(kind)
    return Precision(
        autocast=str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if enabled else None,
        matmul=torch.get_float32_matmul_precision() if kind == "cuda" else None,
    )


def parts_of(value: Any) -> Sequence[tuple[str, Any]] | None:
    """Return what a container holds, each with how its place is written; None where the value is no container.

    Dicts, lists, tuples, what inherits from them, dataclasses and model outputs. No code of their classes runs: it may
    count, fetch, or raise, and is meant for the job.
    """
    kind = type(value)
    if issubclass(kind, dict):
        if "__dataclass_fields__" in vars(kind):  # a model output: its fields, those that are None left out
            return [(f".{name}", item) for name, item in _fields(kind, value) if item is not None]
        return [(f"[{key!r}]" if type(key) in _KEYS else "[...]", item) for key, item in dict.items(value)]
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
        items = enumerate(tuple.__iter__(value))
        return [(f".{names[i]}" if names and i < len(names) else f"[{i}]", item) for i, item in items]
    if issubclass(kind, list):
        return [(f"[{i}]", item) for i, item in enumerate(list.__iter__(value))]
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "to_tuple"):
        return [(f".{name}", item) for name, item in _fields(kind, value)]
    return None


_KEYS = {str, int, bool, float, bytes, type(None)}


def _fields(kind: type, value: Any) -> list[tuple[str, Any]]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError as error:  # a dataclass with slots
        if is_users(error):
            raise
        own = {}
        for name in getattr(kind, "__dataclass_fields__", ()):
            slot = inspect.getattr_static(kind, name, None)
            if inspect.ismemberdescriptor(slot) and (found := _slot(slot, value)) is not None:
                own[name] = found
    return list(dict.items(own))


def _slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError as error:  # not set
        if is_users(error):
            raise
        return None


def tensors_in(value: Any, depth: int = 0) -> Sequence[torch.Tensor]:
    """Return the tensors in nested tuples, lists, dicts, dataclasses and model outputs, in order."""
    if issubclass(type(value), torch.Tensor):
        return [value]
    if depth > 4:
        return []
    kind = type(value)
    if kind is dict:
        return [t for item in value.values() for t in tensors_in(item, depth + 1)]
    if kind is list or kind is tuple:
        return [t for item in value for t in tensors_in(item, depth + 1)]
    return [t for _, item in parts_of(value) or () for t in tensors_in(item, depth + 1)]


def digests_of(value: Any, limit: int) -> list[int]:
    """Fingerprint the tensors in a value, large ones by a sample of their bytes."""
    return [fingerprint.sampled_fingerprint(tensor, limit)[0] for tensor in tensors_in(value)]
