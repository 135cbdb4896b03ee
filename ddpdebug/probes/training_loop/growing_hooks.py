"""Hooks on modules and parameters that become more with each step: one is registered, and none is removed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import location
from ddpdebug.schema.announcements import GrowingHooks as Grown

#: Hooks of one function at one place that are too many, if they have become more in as many looks in a row; a look is
#: at steps 2, 4, 8, and so on.
_MANY, _LOOKS = 8, 3
#: Share of the steps between two looks that has registered one.
_OFTEN = 0.5


class GrowingHooks:
    """The probe of how many hooks there are."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[int, int]] = {}  # (module, which list) -> hooks, looks with more
        self._step, self.over = 0, False

    def look(self, roots: Sequence[torch.nn.Module], step: int) -> Grown | None:
        """Count the hooks on all modules after a step; return those that pile up, once."""
        if self.over or step < 2 or step & (step - 1):
            return None
        found, since, now = None, step - self._step, {}
        for root in roots:
            for name, module in internals.named_modules(root):
                for i, hooks in enumerate(internals.hooks(module)):
                    number, looks = self._before.get((id(module), i), (0, 0))
                    more = self._step > 0 and len(hooks) - number >= _OFTEN * since
                    now[id(module), i] = len(hooks), looks + 1 if more else 0
                    if more and looks + 1 >= _LOOKS and len(hooks) >= _MANY and found is None:
                        found = _grown(name, module, hooks, step)
        self._before, self._step, self.over = now, step, found is not None
        return found


def _grown(name: str, module: torch.nn.Module, hooks: Sequence[Any], step: int) -> Grown | None:
    """Return what piles up, if it is one function that is registered again."""
    code = _code(hooks[-1])
    number = sum([_code(hook) is code for hook in hooks])
    if number < _MANY:
        return None
    known = isinstance(code, CodeType)
    return Grown(
        step=step,
        since=max(0, step + 1 - number),
        module=name or type(module).__name__,
        function=code.co_qualname if known else code.__name__,
        number=number,
        location=location(code.co_filename, code.co_firstlineno) if known else None,
    )


def _code(hook: Any) -> Any:
    """Return what runs as a hook: the code of a function, or the class of another callable."""
    while type(hook) is partial:
        hook = hook.func
    if type(hook) is MethodType:
        hook = hook.__func__
    return hook.__code__ if type(hook) is FunctionType else type(hook)
