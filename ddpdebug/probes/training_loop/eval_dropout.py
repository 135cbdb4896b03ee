"""Finds dropout functions that run in eval mode: looked for once an evaluation has drawn random numbers.

Nothing of the model's is replaced or traced: the functions stay what they are, no profiler is set, and no mode lies
over torch's operations (under one, attention takes another path, with other rounding). The generators before and after
the first forwards in eval mode say whether there is anything to look for; only then hooks of one more forward tell
which module's own code draws, and its source which call that is (`forensics/loss/dropout_calls.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.probes.entries import Entries, ModuleHook
from ddpdebug.probes.values import rng_digest
from ddpdebug.schema.announcements import EvalDropout

#: Forwards in eval mode of one model whose draws are looked at, and those that are followed.
FORWARDS, FOLLOWED = 16, 2
_MAX_CALLS = 8
_MAX_MODULES = 32


#: Returns the calls of dropout functions that a module in eval mode may have drawn by, each with a `name` and a `line`.
DropoutCalls = Callable[[nn.Module], Sequence[Any]]


class _Model:
    """What is known of one model's evaluations."""

    def __init__(self, root: nn.Module) -> None:
        self.ref = weakref.ref(root)
        self.forwards = self.followed = 0
        self.drew = False

    @property
    def done(self) -> bool:
        return self.followed >= FOLLOWED or (not self.drew and self.forwards >= FORWARDS)


class Chance:
    """Watches the forwards of models in eval mode; one at a time."""

    def __init__(self, entries: Entries, calls: DropoutCalls) -> None:
        self._models: dict[int, _Model] = {}
        self._now: _Model | None = None
        self._before: tuple[int, ...] = ()
        self._drawing = _Drawing(entries, calls)

    def begin(self, root: nn.Module) -> None:
        """Look at the forward that begins now, of a model in eval mode."""
        known = self._models.get(id(root))
        if known is None or known.ref() is not root:
            known = self._models[id(root)] = _Model(root)
        if self._now is not None or known.done or internals.anything_compiled():
            return
        self._now = known
        known.forwards += 1
        if known.drew:
            known.followed += 1
            self._drawing.begin(root)
        else:
            self._before = _state(root)

    def end(self, root: nn.Module) -> list[EvalDropout]:
        """Return the calls of dropout functions that were active in modules in eval mode."""
        now, follows = self._now, self._drawing.is_on
        if now is None or now.ref() is not root:
            return []
        self.release()
        if follows:
            calls = self._drawing.calls(root)
            now.followed = FOLLOWED if calls else now.followed
            return calls
        now.drew = now.drew or (bool(self._before) and _state(root) != self._before)
        return []

    def release(self) -> None:
        """Take the hooks away."""
        self._drawing.release()
        self._now = None


class _Drawing:
    """Tells which modules draw random numbers by code of their own, not by that of modules inside them."""

    def __init__(self, entries: Entries, calls: DropoutCalls) -> None:
        self._calls = calls
        self._before: ModuleHook = entries.before_modules("probe:chance", self._enters)
        self._after: ModuleHook = entries.after_modules("probe:chance", self._leaves)
        self._root: weakref.ref[nn.Module] | None = None
        self._state: tuple[int, ...] = ()
        self._inside: list[nn.Module] = []
        self._found: dict[int, nn.Module] = {}

    @property
    def is_on(self) -> bool:
        return self._after.is_on

    def begin(self, root: nn.Module) -> None:
        self._root, self._state = weakref.ref(root), _state(root)
        self._inside, self._found = [], {}
        self._before.on()
        self._after.on()

    def release(self) -> None:
        self._before.off()
        self._after.off()
        self._inside = []

    def _enters(self, module: nn.Module, args: Any) -> None:
        del args
        self._look()
        self._inside.append(module)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        del args, output
        self._look()
        if any(inside is module for inside in self._inside):
            while self._inside.pop() is not module:  # what has raised and was caught
                pass

    def _look(self) -> None:
        root = None if self._root is None else self._root()
        if root is None:
            return
        before, self._state = self._state, _state(root)
        module = self._inside[-1] if self._inside else None
        # a part that was put into train mode by itself draws on purpose (Monte Carlo dropout)
        if module is not None and self._state != before and not module.training and len(self._found) < _MAX_MODULES:
            self._found[id(module)] = module

    def calls(self, root: nn.Module) -> list[EvalDropout]:
        """Return the dropout calls in the code of what was found, where the module belongs to the model."""
        found, self._found = self._found, {}
        told: dict[tuple[str, str], EvalDropout] = {}
        for path, module in internals.named_modules(root):
            if id(module) not in found:
                continue
            for call in self._calls(module):
                fact = EvalDropout(
                    function=call.function,
                    p=call.p,
                    location=call.location,
                    module=path or "(model)",
                    class_name=type(module).__name__,
                )
                if len(told) < _MAX_CALLS:
                    told.setdefault((call.function, call.location), fact)
        return list(told.values())


def _state(root: nn.Module) -> tuple[int, ...]:
    """Return fingerprints of the generators that a forward draws from; waits for nothing, draws nothing."""
    device = next((p.device for p in internals.parameters(root)), None)
    if device is None or device.type != "cuda":
        return (rng_digest(),)
    if torch.cuda.is_current_stream_capturing():
        return ()
    return rng_digest(), fingerprint.fingerprint(torch.cuda.get_rng_state(device))
