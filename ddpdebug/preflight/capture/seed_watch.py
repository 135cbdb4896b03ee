"""Wrappers of the functions that seed global random generators: which ones a script seeds, and in which line."""

from __future__ import annotations

import functools
import importlib
import random
import sys
from typing import Any

import torch

from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.entries import Entries

#: The functions that seed, by the generator that they are for; libraries' own `set_seed` end in these.
_SEEDING: tuple[tuple[str, str, str], ...] = (
    ("random", "random", "seed"),
    ("numpy", "numpy.random", "seed"),
    ("torch", "torch", "manual_seed"),
    ("cuda", "torch.cuda", "manual_seed_all"),
    ("cuda", "torch.cuda", "manual_seed"),
)
NOT_USED = "not used"
_PART = "preflight:seeds"


class SeedWatch:
    """Wrappers of the functions that seed; the mapping that `begin` returns goes into `Subject.facts["seeded"]`.

    It holds the place by the generator's name; `NOT_USED` for one that nobody seeded and nobody drew from until the
    end. A script that has imported one of the functions by name before this began is not seen.

    Args:
        entries: what registers them, and takes them away.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._seeded: dict[str, str] = {}
        self._states: dict[str, str] = {}

    def begin(self) -> dict[str, str]:
        """Wrap the functions; return the mapping from generator to line, which is filled from here on."""
        for generator, name, function in _SEEDING:
            module: Any = sys.modules.get(name) or _imported(name)
            if module is not None:
                self._entries.patch(module, function, before=[(_PART, functools.partial(self._seeds, generator))])
        self._states = _states()
        return self._seeded

    def end(self) -> None:
        """Record the generators whose state has not changed."""
        for generator, state in _states().items():
            if self._states.get(generator) == state:
                self._seeded.setdefault(generator, NOT_USED)

    def _seeds(self, generator: str, /, *args: Any, **kwargs: Any) -> None:
        # without a number, Python and numpy take one from the system
        if any(value is not None for value in (*args, *kwargs.values())):
            self._seeded[generator] = user_location() or "unknown"


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
    """Whether torch's generator has a seed chosen by somebody; a seed of the system has 53 random bits."""
    return torch.initial_seed() < 2**32
