"""Modes of the user over torch's operations: dispatch and function modes, default device, `torch.func` transforms.

A probe must not be seen by them: a mode that counts, logs, refuses or fakes operations would take ours for the job's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpdebug.torch_internals.names import (
    MODE_KINDS as _MODE_KINDS,
    dispatch_mode as _dispatch_mode,
    dispatch_modes as dispatch_modes,
    function_modes as function_modes,
    pre_dispatch_mode as _pre_dispatch_mode,
    top_function_mode as top_function_mode,
    transform as transform,
    without_dispatch as _without_dispatch,
    without_function as _without_function,
)

_PROXY = getattr(_MODE_KINDS, "PROXY", None)
_OF_GRAPHS = [getattr(_MODE_KINDS, name) for name in ("FAKE", "PROXY", "FUNCTIONAL") if hasattr(_MODE_KINDS, name)]


def can_step_aside() -> bool:
    """Whether ddpdebug's operations can bypass the active modes; a transform cannot be bypassed."""
    return transform() is None and _without_dispatch is not None and _without_function is not None


def is_made_a_graph() -> bool:
    """Whether a mode makes a graph of what runs, or runs it without numbers: `make_fx`, export, fake tensors.

    The tensors carry that on where modes are stepped aside of.
    """
    above = [_pre_dispatch_mode(kind) for kind in _OF_GRAPHS if kind is _PROXY]
    return any([mode is not None for mode in [*above, *map(_dispatch_mode, _OF_GRAPHS)]])


def aside_of_modes(probe: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `probe(*args, **kwargs)`, with its operations hidden from all modes."""
    if not dispatch_modes():
        with _without_function():
            return probe(*args, **kwargs)
    with _without_dispatch(), _without_function():
        return probe(*args, **kwargs)
