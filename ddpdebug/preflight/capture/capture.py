"""Capture of an unchanged script's training: its first optimizer steps are recorded, then it is stopped."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpdebug.errors import StopRun
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import is_users, user_location
from ddpdebug.preflight.capture.copies import OptimizerFor, holdings, optimizer_maker, unwrapped
from ddpdebug.preflight.capture.digests import digests, share
from ddpdebug.preflight.capture.recorder import RECORDING, Recorder, Root
from ddpdebug.preflight.capture.sampling import Samples
from ddpdebug.preflight.capture.seed_watch import SeedWatch
from ddpdebug.preflight.capture.tape import Tape, loss_of
from ddpdebug.preflight.subject import Subject
from ddpdebug.probes.entries import entries_of

#: Optimizer steps that are taken from a script: enough for duplicates across batches, few enough to wait for.
STEPS = 4
#: Backward passes after which a script whose optimizer never steps (skipped by GradScaler, not torch's) is stopped.
_MAX_BACKWARDS = 128
#: Tapes that are kept of one optimizer step: they hold copies of the batches.
_KEPT_PER_STEP = 8
_KEPT = 32


#: The parts that are switched off one by one where they fail, beside `RECORDING`.
_SCRIPT, _DATA, _STEPS = "preflight:script", "preflight:data", "preflight:steps"


class Capture:
    """Wrappers of torch's functions that record what the script trains; `close` restores the functions.

    Nothing of them reaches the script but the end that was asked for (`StopRun`): what fails is switched off and said,
    once, and the checks that need it tell the reason.

    Args:
        steps: optimizer steps after which the script is stopped.
    """

    def __init__(self, steps: int = STEPS) -> None:
        guard = Guard(self._failed)
        self.recorder = Recorder(guard)
        guard.when_cut(self._cut)
        self.steps = 0
        self.tapes: list[Tape] = []
        self.micro_batches: list[int] = []
        self.samples = Samples()
        self.facts: dict[str, Any] = {"loaded": False, "evaluated_in_train_mode": None}
        self._wanted = steps
        self._pending: list[Tape | None] = []
        self._backwards = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._stepped: set[int] = set()
        self._inner: set[int] = set()
        self._stepping: list[torch.optim.Optimizer] = []
        self._maker: OptimizerFor | None = None
        self._entries = entries_of(guard)
        self._seeds = SeedWatch(self._entries)

    # --- in and out of place ---

    def install(self) -> None:
        """Install the wrappers; the recorder's function mode is the outermost one, below the script's own."""
        patch, recorder = self._entries.patch, self.recorder

        def recorded(owner: Any, name: str, before: Callable[..., None], after: Callable[..., None]) -> None:
            patch(owner, name, before=[(RECORDING, before)], after=[(RECORDING, after)], failed=[(RECORDING, raised)])

        def raised(_: BaseException, /, *args: Any, **kwargs: Any) -> None:
            recorder.fails(args[0] if args else kwargs.get("tensors"))

        def ends(result: Any, owner: Any, /, *_: Any, **__: Any) -> None:
            recorder.ends(owner, result)

        recorded(nn.Module, "__call__", self._calls, ends)
        recorded(torch.autograd, "backward", self._backward, self._went_back)
        recorded(torch.autograd.Function, "apply", self._applies, ends)
        recorded(torch.amp.GradScaler, "scale", self._scales, ends)
        patch(torch.amp.GradScaler, "update", after=[(_STEPS, self._updated)])
        patch(nn.Module, "load_state_dict", before=[(_SCRIPT, self._loads)])
        patch(torch.optim.Optimizer, "__init__", after=[(_SCRIPT, self._optimizer_made)])
        patch(torch.utils.data.DataLoader, "__init__", after=[(_DATA, self._loader_made)])
        patch(torch.utils.data.DataLoader, "__iter__", before=[(_DATA, self.samples.read)])
        self._entries.on_step([(_STEPS, self._before_step)], [(_STEPS, self._after)], who=lambda _: True)
        self._entries.over_functions(RECORDING, recorder)
        self.facts["seeded"] = self._seeds.begin()

    def close(self) -> None:
        """Remove the wrappers; one that other code has wrapped in turn stays, without effect."""
        if not self._entries.closed:
            self.recorder.done = True
            self.recorder.guard.run("preflight:seeds", self._seeds.end)
            self._entries.close()

    def _cut(self) -> None:
        self._stepping.clear()
        self.recorder.cut()

    def _failed(self, part: str, text: str) -> None:
        """Print which part is off, once, and stop the script where that is the counting of its steps."""
        if part == _DATA:
            self.samples.trouble = self.samples.trouble or text
        elif part in {RECORDING, _STEPS}:
            self.recorder.trouble = self.recorder.trouble or text
        print(f"ddpdebug: preflight: {part.rpartition(':')[2]}: {text}", file=sys.stderr)
        if part == _STEPS and not self.recorder.done:
            self.recorder.done = True
            self.steps = max(1, self.steps)
            raise StopRun(self.steps)

    # --- what the script does ---

    def _calls(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        recorder = self.recorder
        # while the recorder is busy this is backward, where checkpointed parts are computed again
        if recorder.busy or recorder.done or not torch.is_grad_enabled():
            if not torch.is_grad_enabled() and not recorder.busy and module.training:
                self._evaluated(module)
            recorder.begins(module)
        elif unwrapped(module) is not module:  # the forward of what is inside comes here as well
            recorder.begins(module, finish=lambda result: recorder.same(result, recorder.last))
        elif (place := self._place(module)) is None:
            recorder.begins(module)
        else:
            recorder.begins(module, inside=True, finish=recorder.module(*place, args, kwargs))

    def _evaluated(self, module: nn.Module) -> None:
        """Note a forward without gradients of a model that trains, in train mode."""
        if any(root.module is unwrapped(module) for root in self.recorder.roots):
            self.facts["evaluated_in_train_mode"] = self.facts["evaluated_in_train_mode"] or user_location()

    def _place(self, module: nn.Module) -> tuple[int, str] | None:
        """Return where a module is: (number of its model, path); None for what has no parameters, such as losses."""
        roots = self.recorder.roots
        for number, root in enumerate(roots):
            if id(module) in root.paths:
                return number, root.paths[id(module)]
        if next(module.parameters(), None) is None:
            return None
        if self.steps:
            return None  # it has no copy from before the first step
        for candidate in (_owner(module), module):
            try:
                root = Root(candidate)
            except Exception as error:  # the script's class; the next candidate may do
                if is_users(error):
                    raise
                self.recorder.trouble = f"{type(candidate).__name__} cannot be copied: {error}"
                continue
            self.recorder.trouble = None
            self.recorder.add(root)
            return len(roots) - 1, root.paths[id(module)]
        return None

    def _backward(self, tensors: Any = (), *args: Any, **kwargs: Any) -> None:
        graph_kept = bool(kwargs.get("retain_graph") or (len(args) > 1 and args[1]))
        loss = tensors if isinstance(tensors, torch.Tensor) else (tensors[0] if len(tensors) == 1 else None)
        if not self.recorder.done:
            self._pending.append(self.recorder.backward(loss, keep=graph_kept))
            self._backwards += 1
        self.recorder.begins(tensors, inside=True)

    def _went_back(self, _: None, tensors: Any = (), *__: Any, **___: Any) -> None:
        self.recorder.ends(tensors, None)
        if self._backwards >= _MAX_BACKWARDS and not self.steps:
            self._end()

    def _loads(self, *_: Any, **__: Any) -> None:
        self.facts["loaded"] = True

    def _applies(self, kind: Any, /, *args: Any, **kwargs: Any) -> None:
        call = functools.partial(torch.autograd.Function.apply.__func__, kind)  # type: ignore[attr-defined]  # a method
        self.recorder.begins(kind, finish=self.recorder.function(call, args, kwargs))

    def _scales(self, scaler: Any, outputs: Any) -> None:
        self.recorder.begins(scaler, inside=True, finish=lambda result: self.recorder.same(result, outputs))

    def _updated(self, *_: Any, **__: Any) -> None:
        if self._pending and self._optimizer is None and not self.recorder.done:
            self._keep()  # a step that was skipped, which the hooks of the optimizer do not see

    def _optimizer_made(self, _: None, optimizer: Any, /, *__: Any, **___: Any) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    def _loader_made(self, _: None, loader: Any, /, *__: Any, **___: Any) -> None:
        self.samples.made(loader)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.recorder.done:
            return
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            self._inner.add(id(optimizer))  # a part of another one, as in ZeroRedundancyOptimizer
            return
        self._stepped.add(id(optimizer))
        if self._optimizer is None:
            self._optimizer = optimizer

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.recorder.done:
            return
        while self._stepping and self._stepping.pop() is not optimizer:
            continue  # of a step that raised
        if self._stepping:
            return
        if optimizer is self._optimizer:
            if not self.steps:  # not before: a closure has called the model by now
                names = self._names()
                self._maker = _quiet(lambda: optimizer_maker(optimizer, names))
            self.steps += 1
            self._keep()
        self._pending.clear()  # of another optimizer
        self.recorder.forget()
        if self.steps >= self._wanted:
            self._end()

    def _names(self) -> dict[int, str]:
        roots = self.recorder.roots
        prefix = "" if len(roots) == 1 else "{}."
        return {key: prefix.format(n) + name for n, root in enumerate(roots) for key, name in root.names.items()}

    def _keep(self) -> None:
        self.micro_batches.append(len(self._pending))
        self.tapes += [tape for tape in self._pending if tape is not None][:_KEPT_PER_STEP]
        del self.tapes[_KEPT:]
        self._pending.clear()
        self.recorder.forget()

    def _end(self) -> None:
        if not self.steps:
            self.steps += 1
            self._keep()
        self.recorder.done = True
        known = [optimizer for made in self._optimizers if (optimizer := made()) is not None]
        alive = [optimizer for optimizer in known if id(optimizer) not in self._inner]
        names = self._names()
        self.facts["holdings"] = holdings([(o, id(o) in self._stepped) for o in alive], names)
        own = [] if self._optimizer is None else self._optimizer.param_groups
        self.facts["trained"] = [names[id(p)] for group in own for p in group["params"] if id(p) in names]
        with torch.no_grad():
            self.samples.draw()
            self.facts["world"] = int(os.environ.get("WORLD_SIZE", "1"))
            self.facts["ranks"] = share(_quiet(lambda: digests(self.tapes)))
        raise StopRun(self.steps)

    # --- what came of it ---

    def subject(self) -> Subject | None:
        """Return the subject of the checks; None if no training step was seen."""
        roots = self.recorder.roots
        if not roots or not self.steps:
            return None
        model = roots[0].copy if len(roots) == 1 else nn.ModuleList([root.copy for root in roots])
        for tape in self.tapes:
            tape.roots = len(roots)
        trouble = self.recorder.trouble
        self.facts |= {"steps": self.steps, "not_recorded": None if self.tapes else trouble or "no loss was seen"}
        self.facts["loaders"] = self.samples.facts()
        return Subject(
            model=model,
            loss_of=loss_of,
            optimizer_for=self._maker,
            batches=self.tapes,
            micro_batches=max(1, statistics.median_low(self.micro_batches or [1])),
            facts=self.facts,
            samples=self.samples,
        )


def _owner(module: nn.Module) -> nn.Module:
    """Return the largest module that the script holds this one in, if it trains more than this one."""
    own = {id(p) for p in module.parameters() if p.requires_grad}
    best, size = module, len(own)
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and thing is not module:
            try:
                if unwrapped(thing) is not thing or all(part is not module for part in thing.modules()):
                    continue
                others = sum(p.requires_grad for p in thing.parameters())
            except Exception as error:  # half made, or a class of its own
                if is_users(error):
                    raise
                continue
            if others > size:
                best, size = thing, others
    return best


def _quiet(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # an optimizer of its own kind; checks that need it say so
        if is_users(error):
            raise
        return None
