"""Takes from an unchanged script what it trains: its own first optimizer steps are recorded, then it is stopped."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import statistics
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpdebug.errors import StopRun
from ddpdebug.isolation.user_code import user_location
from ddpdebug.preflight.capture.copies import OptimizerFor, optimizer_maker, unwrapped
from ddpdebug.preflight.capture.digests import digests
from ddpdebug.preflight.capture.holdings import holdings
from ddpdebug.preflight.capture.recorder import Recorder, Root
from ddpdebug.preflight.capture.sampling import Samples
from ddpdebug.preflight.capture.seed_watch import SeedWatch
from ddpdebug.preflight.capture.tape import Tape, loss_of
from ddpdebug.preflight.sandbox import ranks
from ddpdebug.preflight.subject import Subject

#: Optimizer steps that are taken from a script: enough for duplicates across batches, few enough to wait for.
STEPS = 4
#: Backward passes after which a script whose optimizer never steps (skipped by GradScaler, not torch's) is stopped.
_MAX_BACKWARDS = 128
#: Tapes that are kept of one optimizer step: they hold copies of the batches.
_KEPT_PER_STEP = 8
_KEPT = 32


class Capture:
    """Patches of torch's classes while the script runs, which note what it trains; `close` removes them."""

    def __init__(self, steps: int = STEPS) -> None:
        self.recorder = Recorder()
        self.steps = 0
        self.tapes: list[Tape] = []
        self.micro_batches: list[int] = []
        self.samples = Samples()
        self.facts: dict[str, Any] = {"schedulers": [], "backward": None, "loaded": False}
        self.facts["evaluated_in_train_mode"] = None
        self._wanted = steps
        self._pending: list[Tape | None] = []
        self._backwards = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._stepped: set[int] = set()
        self._inner: set[int] = set()
        self._stepping: list[torch.optim.Optimizer] = []
        self._maker: OptimizerFor | None = None
        self._undo: list[Callable[[], None]] = []
        self._depth = 0

    # --- in and out of place ---

    def install(self) -> None:
        """Begin to look; the mode of the recorder is the outermost one, below the script's own."""
        self._wrap(nn.Module, "__call__", self._called)
        self._wrap(nn.Module, "load_state_dict", self._loaded)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.autograd.Function, "apply", self._applied, bound=True)
        self._wrap(torch.amp.GradScaler, "scale", self._scaled)
        self._wrap(torch.amp.GradScaler, "update", self._updated)
        self._wrap(torch.optim.lr_scheduler.LRScheduler, "__init__", self._scheduler)
        self._wrap(torch.optim.Optimizer, "__init__", self._optimizer_made)
        self._wrap(torch.utils.data.DataLoader, "__init__", self._loader_made)
        self._wrap(torch.utils.data.DataLoader, "__iter__", self._loader_read)
        handles = [register_optimizer_step_pre_hook(self._before_step), register_optimizer_step_post_hook(self._after)]
        self._undo.extend(handle.remove for handle in handles)
        stack = contextlib.ExitStack()
        stack.enter_context(self.recorder)
        self.facts["seeded"] = stack.enter_context(SeedWatch()).seeded
        self._undo.append(stack.close)

    def close(self) -> None:
        """Leave the process as it was."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: Any, name: str, act: Callable[..., Any], *, bound: bool = False) -> None:
        kept = vars(owner)[name]
        original = kept.__func__ if bound else kept

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return act(original, *args, **kwargs)

        setattr(owner, name, classmethod(wrapper) if bound else wrapper)
        self._undo.append(lambda: setattr(owner, name, kept))

    # --- what the script does ---

    def _called(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # while the recorder is busy this is backward, where checkpointed parts are computed again
        if self._depth or self.recorder.busy or not torch.is_grad_enabled() or self.recorder.done:
            if not torch.is_grad_enabled() and not self._depth and module.training:
                self._evaluated(module)
            return original(module, *args, **kwargs)
        inner = unwrapped(module)
        if inner is not module:
            result = original(module, *args, **kwargs)  # its forward comes here again
            self.recorder.same(result, self.recorder.last)
            return result
        place = self._place(module)
        if place is None:
            return original(module, *args, **kwargs)
        self._depth += 1
        try:
            return self.recorder.call(*place, functools.partial(original, module), args, kwargs)
        finally:
            self._depth -= 1

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
            except Exception as error:  # noqa: BLE001 - the script's class; the next candidate may do
                self.recorder.trouble = f"{type(candidate).__name__} cannot be copied: {error}"
                continue
            self.recorder.trouble = None
            self.recorder.add(root)
            return len(roots) - 1, root.paths[id(module)]
        return None

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        graph_kept = bool(kwargs.get("retain_graph") or (len(args) > 1 and args[1]))
        loss = tensors if isinstance(tensors, torch.Tensor) else (tensors[0] if len(tensors) == 1 else None)
        if not self.recorder.done:
            self.facts["backward"] = self.facts["backward"] or user_location()
            self._pending.append(self.recorder.backward(loss, keep=graph_kept))
            self._backwards += 1
        with self.recorder.inside():
            result = original(tensors, *args, **kwargs)
        if self._backwards >= _MAX_BACKWARDS and not self.steps:
            self._end()
        return result

    def _loaded(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.facts["loaded"] = True
        return original(module, *args, **kwargs)

    def _applied(self, original: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.follow(functools.partial(original, kind), args, kwargs)

    def _scaled(self, original: Any, scaler: Any, outputs: Any) -> Any:
        with self.recorder.inside():
            result = original(scaler, outputs)
        self.recorder.same(result, outputs)
        return result

    def _updated(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if self._pending and self._optimizer is None and not self.recorder.done:
            self._keep()  # a step that was skipped, which the hooks of the optimizer do not see

    def _scheduler(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        self.facts["schedulers"].append(type(scheduler).__name__)

    def _optimizer_made(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(weakref.ref(optimizer))

    def _loader_made(self, original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        self.samples.made(loader)

    def _loader_read(self, original: Any, loader: Any) -> Any:
        self.samples.read(loader)
        return original(loader)

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
        with self.recorder.inside(), torch.no_grad():
            self.samples.draw()
            self.facts["world"] = int(os.environ.get("WORLD_SIZE", "1"))
            self.facts["ranks"] = ranks.share(_quiet(lambda: digests(self.tapes)))
        raise StopRun(self.steps)

    # --- what came of it ---

    def subject(self) -> Subject | None:
        """Return what is to be examined; None where no training step was seen."""
        roots = self.recorder.roots
        if not roots or not self.steps:
            return None
        model = roots[0].copy if len(roots) == 1 else nn.ModuleList([root.copy for root in roots])
        for tape in self.tapes:
            tape.roots = len(roots)
        trouble = self.recorder.trouble
        self.facts |= {"steps": self.steps, "not_recorded": None if self.tapes else trouble or "no loss was seen"}
        self.facts["read"] = sorted({name for tape in self.tapes for name in tape.read})
        self.facts["loaders"] = self.samples.facts()
        return Subject(
            model=model,
            loss_of=loss_of,
            optimizer_for=self._maker,
            batches=self.tapes,
            micro_batches=max(1, statistics.median_low(self.micro_batches)),
            make_batches=self.samples.anew(),
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
            except Exception:  # noqa: BLE001, S112 - half made, or a class of its own
                continue
            if others > size:
                best, size = thing, others
    return best


def _quiet(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception:  # noqa: BLE001 - an optimizer of its own kind; checks that need it say so
        return None
