"""Checks of model, data, loss and optimizer before training, on copies of the script's objects.

The package can be called: `ddpdebug.preflight(model, loss_fn, optimizer, batches)` is `preflight` of `api`. Importing
it does not load torch.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """A package of the same name as its function: `ddpdebug.preflight` is both."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from ddpdebug.preflight.api import preflight  # noqa: PLC0415 - loads torch

        return preflight(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
