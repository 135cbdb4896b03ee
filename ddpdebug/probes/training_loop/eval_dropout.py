"""Modules that draw random numbers in an evaluation, with the dropout functions that they call.

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
from ddpdebug.probes.entries import Entries
from ddpdebug.probes.module_calls import ModuleHook
from ddpdebug.probes.values import rng_digest
from ddpdebug.schema.announcements import DrawingModule, DropoutCall, EvalDraws

#: Forwards in eval mode of one model whose draws are looked at, and those that are followed.
FORWARDS, FOLLOWED = 16, 2
_MAX_CALLS = 16
_MAX_MODULES, _MAX_TOLD = 64, 16


#: Returns the calls of dropout functions in a module's source, and whether it draws in other ways too.
DropoutCalls = Callable[[nn.Module], tuple[Sequence[DropoutCall], bool]]


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
    """The probe of random numbers in eval-mode forwards; one forward at a time."""

    def __init__(self, entries: Entries, calls: DropoutCalls) -> None:
        self._models: dict[int, _Model] = {}
        self._now: _Model | None = None
        self._before: tuple[int, ...] = ()
        self._drawing = _Drawing(entries, calls)

    def begin(self, root: nn.Module) -> None:
        """Observe the forward that begins now, of a model in eval mode."""
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
            self._before = generators(root)

    def end(self, root: nn.Module) -> EvalDraws | None:
        """Return the modules that drew random numbers and whose source calls dropout functions, if there are any."""
        now, follows = self._now, self._drawing.is_on
        if now is None or now.ref() is not root:
            return None
        try:
            modules = self._drawing.told(root) if follows else ()
        finally:
            self.release()
        if follows:
            now.followed = FOLLOWED if modules else now.followed
            return EvalDraws(modules=modules) if modules else None
        now.drew = now.drew or (bool(self._before) and generators(root) != self._before)
        return None

    def release(self) -> None:
        """Remove the hooks."""
        self._drawing.release()
        self._now = None


class _Drawing:
    """Returns which modules draw random numbers by code of their own, not by that of modules inside them."""

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
        self._root, self._state = weakref.ref(root), generators(root)
        self._inside, self._found = [root], {}  # where no DDP is around it, its hook has run before its forward began
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
        if any([inside is module for inside in self._inside]):
            while self._inside.pop() is not module:  # what has raised and was caught
                pass

    def _look(self) -> None:
        root = None if self._root is None else self._root()
        if root is None:
            return
        before, self._state = self._state, generators(root)
        module = self._inside[-1] if self._inside else None
        if module is not None and self._state != before and len(self._found) < _MAX_MODULES:
            self._found[id(module)] = module

    def told(self, root: nn.Module) -> tuple[DrawingModule, ...]:
        """Return what was found and belongs to the model, as far as its source calls dropout functions."""
        self._look()
        self._inside = []
        found, self._found = self._found, {}
        told = []
        for path, module in internals.named_modules(root):
            calls, draws_otherwise = self._calls(module) if id(module) in found else ((), False)
            if calls:
                about = DrawingModule(
                    path=path or "(model)",
                    class_name=type(module).__name__,
                    training=internals.in_train_mode(module),
                    draws_otherwise=draws_otherwise,
                    calls=tuple(calls[:_MAX_CALLS]),
                )
                told.append(about)
        return tuple(sorted(told, key=lambda about: about.training)[:_MAX_TOLD])


def generators(root: nn.Module) -> tuple[int, ...]:
    """Return fingerprints of the generators that a forward may use; waits for nothing, draws nothing."""
    device = next(iter([p.device for p in internals.parameters(root)]), None)
    if device is None or device.type != "cuda":
        return (rng_digest(),)
    if torch.cuda.is_current_stream_capturing():
        return ()
    return rng_digest(), fingerprint.fingerprint(torch.cuda.get_rng_state(device))
