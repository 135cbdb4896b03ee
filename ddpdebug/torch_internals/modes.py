"""What the user has put over torch's operations: dispatch and function modes, default device, `torch.func` transforms.

A probe must not be seen by them: a mode that counts, logs, refuses or fakes operations would take ours for the job's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch


def _none() -> int:
    return 0


def _no_transform() -> object | None:
    return None


#: How many modes lie on this thread's stacks; 0 where torch does not tell.
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _none)
function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", _none)
#: The innermost `torch.func` transform (vmap, grad, functionalize) that runs, None outside of all.
transform: Callable[[], object | None] = getattr(torch._C._functorch, "peek_interpreter_stack", _no_transform)

_without_dispatch: Any = getattr(_python_dispatch, "_disable_current_modes", None)
_without_function: Any = getattr(torch._C, "DisableTorchFunction", None)


def can_step_aside() -> bool:
    """Tell whether operations of ours can be kept from what is active; a transform cannot be left."""
    return transform() is None and _without_dispatch is not None and _without_function is not None


def aside_of_modes(probe: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `probe(*args, **kwargs)`, whose operations no mode sees."""
    if not dispatch_modes():
        with _without_function():
            return probe(*args, **kwargs)
    with _without_dispatch(), _without_function():
        return probe(*args, **kwargs)
