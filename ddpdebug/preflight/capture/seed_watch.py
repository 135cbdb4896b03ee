"""Notes which of the global generators a script seeds, and where, while it runs."""

from __future__ import annotations

import functools
import importlib
import random
import sys
from collections.abc import Callable
from typing import Any, Self

import torch

from ddpdebug.isolation.user_code import user_location

#: The functions that seed, by the generator that they are for; libraries' own `set_seed` end in these.
_DOORS: tuple[tuple[str, str, str], ...] = (
    ("random", "random", "seed"),
    ("numpy", "numpy.random", "seed"),
    ("torch", "torch", "manual_seed"),
    ("cuda", "torch.cuda", "manual_seed_all"),
    ("cuda", "torch.cuda", "manual_seed"),
)


NOT_USED = "not used"


class SeedWatch:
    """Stands before the functions that seed; `seeded` goes into `Subject.facts["seeded"]`.

    It holds the place by the generator's name; `NOT_USED` for one that nobody seeded and nobody drew from until the
    end. A script that has imported one of the functions by name before this began is not seen.
    """

    def __init__(self) -> None:
        self.seeded: dict[str, str] = {}
        self._undo: list[Callable[[], None]] = []
        self._states: dict[str, str] = {}

    def __enter__(self) -> Self:
        for generator, name, function in _DOORS:
            module: Any = sys.modules.get(name) or _imported(name)
            if module is not None:
                self._stand(generator, module, function)
        self._states = _states()
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()
        for generator, state in _states().items():
            if self._states.get(generator) == state:
                self.seeded.setdefault(generator, NOT_USED)

    def _stand(self, generator: str, module: Any, name: str) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def seeding(*args: Any, **kwargs: Any) -> Any:
            # without a number, Python and numpy take one from the system
            if any(value is not None for value in (*args, *kwargs.values())):
                self.seeded[generator] = user_location() or "unknown"
            return original(*args, **kwargs)

        setattr(module, name, seeding)
        self._undo.append(lambda: setattr(module, name, original))


def _states() -> dict[str, str]:
    """Return the states of the generators that do not tell by themselves whether they are seeded."""
    found = {"random": repr(random.getstate())}
    numpy = _imported("numpy.random")
    if numpy is not None:
        found["numpy"] = repr([getattr(part, "tobytes", lambda part=part: part)() for part in numpy.get_state()])
    return found


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def torch_is_seeded() -> bool:
    """Tell whether torch's generator has a seed that somebody chose: the system's have 53 random bits."""
    return torch.initial_seed() < 2**32
