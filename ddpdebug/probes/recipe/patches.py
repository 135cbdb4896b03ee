"""The further doors through which the recipe is seen: optimizers' constructors, schedulers, clipping, unscaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpdebug.probes.guard import user_location
from ddpdebug.probes.recipe import Recipe
from ddpdebug.probes.recipe.schedules import STEPS

Run = Callable[..., Any]
Make = Callable[[Any, Any], Any]


def doors(recipe: Recipe, run: Run) -> Iterator[tuple[Any, str, Make]]:
    """Yield owner, name and maker of each wrapper."""
    yield torch.optim.Optimizer, "__init__", lambda _, original: _built(recipe, run, original)
    for kind in STEPS:
        yield kind, "step", lambda _, original: _scheduled(recipe, run, original)
    yield ReduceLROnPlateau, "__init__", lambda _, original: _waiting(recipe, run, original)
    yield torch.nn.utils, "clip_grad_value_", lambda _, original: _clipped(recipe, run, original)
    yield torch.amp.GradScaler, "unscale_", lambda _, original: _unscaled(recipe, run, original)


def _built(recipe: Recipe, run: Run, original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        run("probe:recipe", recipe.built, self)

    return __init__


def _scheduled(recipe: Recipe, run: Run, original: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # a given epoch is absolute: said twice it is the same
        run("probe:recipe", recipe.schedules.moved if args or kwargs else recipe.schedules.called, self)
        return original(self, *args, **kwargs)

    return step


def _waiting(recipe: Recipe, run: Run, original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        run("probe:recipe", recipe.schedules.built, self)

    return __init__


def _clipped(recipe: Recipe, run: Run, original: Any) -> Any:
    def clip_grad_value_(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            run("probe:recipe", lambda: recipe.clipped(user_location()))
        return result

    return clip_grad_value_


def _unscaled(recipe: Recipe, run: Run, original: Any) -> Any:
    def unscale_(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        run("probe:recipe", recipe.unscaled)
        return result

    return unscale_
