"""The training thread's side: follows forward, backward and optimizer step, and hands over one record per step.

Order of events in one step: forwards (each DDP decides there whether its backward will be reduced), backwards
(local gradients appear, are reduced), clipping, optimizer step. Everything here runs inside `Guard.run`.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.exchange.step_vote import NumericGuard
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes import async_copy as device, contract, gradients, memory, notes, replicas, values
from ddpdebug.probes.buffers import Buffers
from ddpdebug.probes.ddp_wrapper import Wrapper, announce_model
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.events import Events
from ddpdebug.probes.forward_capture import Scenes
from ddpdebug.probes.gradient_hooks import GradientHooks
from ddpdebug.probes.last_state import LastState
from ddpdebug.probes.nonfinite import Numerics
from ddpdebug.probes.optimizers import OptimizerWatch, first_step, index_of
from ddpdebug.probes.record import StepRecord, Window
from ddpdebug.probes.step_vote import Guarding
from ddpdebug.probes.values import loss_reader, rng_digest, tensors_in
from ddpdebug.schema.announcements import Announce, WrapperGroup
from ddpdebug.schema.row import Flag

_OUTPUT_BYTES = 1 << 16
_MAX_EVAL_FORWARDS = 64
_BATCH_BYTES = 1 << 20
#: So many backward passes without any optimizer step are looked into.
_LONELY_BACKWARDS = 8


class Recorder:
    """Collects one rank's observations.

    Args:
        emit: takes a finished record; must not block.
        announce: tells all ranks.
        due: tells for (optimizer, step) whether the sampled tier runs.
    """

    def __init__(
        self,
        guard: Guard,
        emit: Callable[[StepRecord], None],
        announce: Announce,
        due: Callable[[int, int], bool],
        world: int,
    ) -> None:
        self.guard, self.entries, self._world = guard, entries_of(guard), world
        guard.on_cut = self.cut
        self.forget_half: list[Callable[[], None]] = []  # called when an exception has cut something short
        self.wrappers: list[Wrapper] = []
        self.watches: list[OptimizerWatch] = []
        self.replicas, self.scenes = replicas.Replicas(self.entries), Scenes(guard)
        self.memory = memory.MemoryProbe()
        self.backwards = self.syncs = self.in_backward = self.pre_steps = 0
        self.checking = True
        self._no_syncs: dict[int, list[weakref.ref[Any]]] = {}  # id of a DDP -> its contexts
        self._started: list[float] = []  # of the forwards and backwards that run
        self.window = Window(started=time.perf_counter())
        self.want_norms = False  # a comparison with a tolerance needs numbers, not digests
        self.after_step: Callable[[OptimizerWatch, int], None] = lambda watch, step: None
        self.last_look: Callable[[OptimizerWatch], None] = lambda watch: None  # its optimizer has been freed
        self.last_state = LastState()
        self.stop: Callable[[], BaseException | None] = lambda: None
        self.adopt: Callable[[list[torch.Tensor]], None] = lambda params: None  # of models that no DDP wraps
        self.on_lonely: Callable[[], None] = lambda: None  # backward runs, and no optimizer has stepped
        self.averaged = False  # a ModelAverager was used: replicas differ on purpose in between
        self._emit, self._announce, self._due = emit, announce, due
        self._by_optimizer: dict[int, OptimizerWatch] = {}
        self._fused: OptimizerWatch | None = None
        self._fused_stepped = False
        self._stepping: list[int] = []
        self._pre: tuple[OptimizerWatch, StepRecord, float] | None = None
        self.events = Events(self, announce)
        self.hooks, self.buffers, self.numerics = GradientHooks(self), Buffers(self), Numerics(self)
        self.guarding: Guarding | None = None
        self._halt: BaseException | None = None
        guard.when_off("probe:backward", self._forget_backward)
        guard.when_off("probe:numerics-forward", self.numerics.abort)
        guard.when_off("probe:numerics", self.numerics.abort)
        guard.when_off("probe:scene", self.scenes.clear)
        guard.when_off("probe:replicas", self.replicas.release)
        guard.needs("probe:buffers", "probe:broadcast")  # whether DDP has just made them alike
        guard.needs("probe:forward", "probe:no-sync")  # whether its backward is meant to be reduced
        guard.needs("probe:losses", "probe:scaler")  # what the losses were multiplied with
        guard.needs("probe:numerics-gradients", "probe:gradients")
        guard.needs(
            "probe:layers", "probe:modules", "probe:numerics-forward"
        )  # which say when a sample begins and ends
        guard.needs("probe:numerics-after", "probe:numerics", "probe:state")  # which judges the step before
        #: Called when this rank has made something non-finite, before the optimizer or backward: see Numerics.
        self.on_nonfinite: Callable[[OptimizerWatch, StepRecord], Any] = lambda watch, record: None
        self.on_loss: Callable[..., Any] = lambda loss, looks, *, finite: None

    def stop_here(self) -> None:
        """Raise what all ranks agreed to raise at this step, if anything (`--steps`, `on_finding="raise"`, guard)."""
        halt, self._halt = self._halt, None
        if (error := halt or self.guard.contain("stop", self.stop)) is not None:
            raise error

    def guard_with(self, guard: NumericGuard | None) -> None:
        """Let the numeric guard decide about steps; without any, nothing numeric is looked at."""
        self.numerics.on = guard is not None
        if guard is not None and guard.active:
            self.guarding, self.numerics.every_step = Guarding(self, guard), True

    # --- which thread, and what was cut short -------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self._world

    @world.setter
    def world(self, world: int) -> None:
        self._world, self.entries.threads.compared = world, world > 1

    def follows_forward(self, ddp: DistributedDataParallel, *_: Any, **__: Any) -> bool:
        """Tell whether a forward runs in the thread that is followed; what trains in another one is left alone."""
        threads = self.entries.threads
        if not torch.is_grad_enabled():
            return threads.is_here()
        wrapper = self.wrapper_of(ddp)
        if threads.begins(0 if wrapper is None else wrapper.index):
            return True
        if wrapper is not None:
            wrapper.elsewhere = True
        return False

    def follows_backward(self, *_: Any, **__: Any) -> bool:
        """Tell whether a backward runs in the thread that is followed."""
        threads = self.entries.threads
        return threads.begins() or (bool(self.in_backward) and threads.is_autograd())

    def follows_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer steps in the thread that is followed, or inside its backward.

        Where another thread steps what is followed here, nothing can be told from its gradients any more.
        """
        threads = self.entries.threads
        if (self.in_backward and threads.is_autograd()) or threads.begins():
            return True
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for watch in self.watches:
            if not watch.given_up and not stepped.isdisjoint(map(id, watch.params)):
                watch.given_up = True
                what = (
                    f"parameters of optimizer {watch.index} are stepped by several threads: it is no longer looked at"
                )
                self.guard.tell("threads", what)
        return False

    def cut(self) -> None:
        """Forget what was half noted when an exception of the user's came through: this step is not judged."""
        number = self.window.number
        self.window = Window(started=time.perf_counter(), overhead_before=self.guard.elapsed(), number=number, cut=True)
        self._stepping.clear()
        self._started.clear()
        self._pre, self.in_backward, self._fused_stepped = None, 0, False
        for wrapper in self.wrappers:
            wrapper.cut()
        self.numerics.abort()
        for forget in self.forget_half:
            forget()
        self.entries.tidy()

    # --- models -------------------------------------------------------------------------------------------------------

    def before_wrap(self, module: torch.nn.Module, process_group: Any) -> None:
        """Announce a module's structure and initial values before DDP checks and broadcasts them."""
        self.forget()
        announce_model(module, len(self.wrappers), internals.ranks_of(process_group), self._announce)

    def forget(self) -> None:
        """Let go of what belongs to models and optimizers that are gone."""
        for watch in self.watches:
            watch.forget()
        self.hooks.forget()

    def wrapped(self, ddp: DistributedDataParallel) -> Wrapper:
        """Begin to watch a DDP."""
        if (known := self.wrapper_of(ddp)) is not None:
            return known
        wrapper = Wrapper(ddp, len(self.wrappers), self.entries)
        self.wrappers.append(wrapper)
        self._announce(WrapperGroup(ranks=tuple(wrapper.group)), wrapper.index)
        for parameter in internals.parameters(ddp.module):
            if id(parameter) in wrapper.trainable:
                self.hooks.add(parameter, wrapper)
        return wrapper

    def wrapper_of(self, ddp: DistributedDataParallel) -> Wrapper | None:
        """Return the watch of a DDP, if there is one."""
        return next((w for w in self.wrappers if w.ref() is ddp), None)

    def no_sync(self, context: Any, ddp: DistributedDataParallel) -> None:
        """Note a context in which gradients are not reduced."""
        known = self._no_syncs.setdefault(id(ddp), [])
        known[:] = [ref for ref in known if ref() is not None]
        known.append(weakref.ref(context))

    def _in_no_sync(self, ddp: DistributedDataParallel) -> bool:
        """Tell whether such a context has been entered and not left: its generator waits in its middle."""
        contexts = (ref() for ref in self._no_syncs.get(id(ddp), ()))
        generators = (getattr(context, "gen", None) for context in contexts)
        return any(inspect.isgenerator(g) and inspect.getgeneratorstate(g) == inspect.GEN_SUSPENDED for g in generators)

    def release(self) -> None:
        """Remove every hook from the user's tensors."""
        self.hooks.release()
        for wrapper in self.wrappers:
            if wrapper.call_site is not None:
                wrapper.call_site.remove()
        self.replicas.release()
        self.scenes.clear()

    # --- forward ------------------------------------------------------------------------------------------------------

    def begin_forward(self, ddp: DistributedDataParallel, args: Any, kwargs: Any) -> None:
        """Note the inputs and the promise of a DDP forward."""
        wrapper = self.wrapped(ddp)
        wrapper.in_forward, wrapper.elsewhere = True, False
        self._started.append(0.0)
        self.events.drop_gathers()
        if not torch.is_grad_enabled():
            self.pause()
            if self.checking and not ddp.module.training and len(self.window.eval_batch) < _MAX_EVAL_FORWARDS:
                self.window.eval_batch.append(fingerprint.combine(values.digests_of((args, kwargs), _BATCH_BYTES)))
            return
        location = None if ddp.require_backward_grad_sync else user_location()
        wrapper.begin_forward(ddp, in_no_sync=self._in_no_sync(ddp), location=location)
        for told in wrapper.settings.at_forward(ddp.module):
            self._announce(replace(told, step=self.next_step()), wrapper.index)
        w = self.window
        if self.checking:
            w.modes = (w.modes or b"") + bytes([m.training for m in internals.modules(ddp.module)])
            w.rng = w.rng or rng_digest()
        if w.delivered:
            w.record.append(w.delivered)
            w.delivered = 0
        self.guard.run("probe:batch", self._look_at_batch, args, kwargs)
        self._started[-1] = time.perf_counter()

    def _look_at_batch(self, args: Any, kwargs: Any) -> None:
        w, tensors = self.window, list(tensors_in((args, kwargs)))
        self.guard.run("probe:memory", self.memory.inputs, tensors)
        for tensor in tensors:
            value, sampled = fingerprint.sampled_fingerprint(tensor, _BATCH_BYTES)
            w.batch.append(value)
            if sampled:
                w.flags |= Flag.BATCH_SAMPLED

    def _look_at_output(self, output: Any) -> None:
        self.window.output += values.digests_of(output, _OUTPUT_BYTES)

    def begin_numerics(self, ddp: DistributedDataParallel, args: Any, kwargs: Any) -> None:
        """Look at the numbers of a DDP forward from here on."""
        prefix = f"ddp{self.wrapped(ddp).index}." if len(self.wrappers) > 1 else ""
        self.numerics.begin(ddp.module, prefix, args, kwargs)

    def end_forward(self, ddp: DistributedDataParallel, output: Any) -> None:
        """Note the output of a DDP forward."""
        self.wrapped(ddp).in_forward = False
        started = self._started.pop() if self._started else 0.0
        self.guard.run("probe:memory", self.memory.graph, output)
        w = self.window
        if not torch.is_grad_enabled() or started == 0.0:
            if len(w.eval_output) < len(w.eval_batch):
                w.eval_output.append(fingerprint.combine(values.digests_of(output, _OUTPUT_BYTES)))
            return
        w.forward_seconds += time.perf_counter() - started
        if not self.checking:
            return
        self.guard.run("probe:output", self._look_at_output, output)
        if w.rng and rng_digest() != w.rng:
            w.flags |= Flag.RNG_USED_IN_FORWARD

    def abort_forward(self, ddp: DistributedDataParallel) -> None:
        """Note that a DDP forward has raised."""
        if (wrapper := self.wrapper_of(ddp)) is not None:
            wrapper.in_forward = False
        if self._started:
            self._started.pop()

    # --- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self, tensors: Any = None, *_: Any, **__: Any) -> None:
        """Note the loss."""
        self.in_backward += 1
        self._started.append(time.perf_counter())
        self.events.close_gathers()
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
        self.guard.run("probe:memory", self.memory.graph, roots)
        known = "probe:scaler" not in self.guard.off  # else nobody knows what the loss was multiplied with
        if known and len(roots) == self.in_backward == 1 and internals.is_plain(roots[0]) and roots[0].numel() == 1:
            scale = self.events.take_scale()
            self.window.losses.append(loss_reader(roots[0].detach(), scale))
            self.guard.run("probe:numerics-loss", self.numerics.note_loss, roots[0], self.window.losses[-1])
        self._started[-1] = time.perf_counter()

    def _forget_backward(self) -> None:
        """Be outside of any backward: nobody sees the end of this one, or of a later one."""
        self.in_backward = 0
        self._started.clear()

    def abort_backward(self, *_: Any, **__: Any) -> None:
        """Note that a backward has raised: which gradients came and which were reduced, nobody knows."""
        self.cut()

    def end_backward(self, *_: Any, **__: Any) -> None:
        """Note what was reduced."""
        if not self.in_backward:  # it was cut
            return
        started = self._started.pop() if self._started else time.perf_counter()
        self.in_backward -= 1
        if self.in_backward:
            return
        w = self.window
        w.backward_seconds += time.perf_counter() - started
        w.micro_batches += 1
        self.backwards += 1
        if self.backwards == _LONELY_BACKWARDS and not self.watches:
            self.on_lonely()
        location: str | None = None
        for wrapper in self.wrappers:
            if not wrapper.arrived or wrapper.elsewhere or "probe:forward" in self.guard.off:
                continue  # without its forwards nothing is known of a wrapper, and it must not look bypassed
            if wrapper.forwards == 0 or not wrapper.armed:
                location = location or user_location()
            if wrapper.end_backward(location):
                self.syncs += 1
                if self.checking:
                    self.guard.run("probe:gradients", gradients.note_reduced, w, wrapper)
        if self._fused_stepped:
            self._finish_fused()

    # --- optimizer ----------------------------------------------------------------------------------------------------

    def pre_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Look at gradients, settings and parameters just before an optimizer changes them."""
        self.pre_steps += 1
        if self._stepping and id(optimizer) in self._stepping:
            self._stepping.clear()  # the previous step raised and never reached its post hook
        self._stepping.append(id(optimizer))
        if len(self._stepping) > 1:
            return
        if self.in_backward and "probe:backward" not in self.guard.off:  # its end is not seen then
            self._fuse(optimizer)
            return
        watch = self._watch(optimizer)
        if watch.given_up:
            return
        record = self._begin(watch)
        closure = any(map(callable, args)) or callable(kwargs.get("closure"))  # torch passes itself among `args`
        if closure:
            record.flags |= Flag.CLOSURE
        if record.flags & Flag.CHECKED:
            if not closure:
                self.guard.run("probe:step-gradients", notes.note_gradients, self.window, watch, record)
            self.guard.run("probe:parameters", notes.note_before, watch, record)
            self.guard.run("probe:state", notes.note_small_state, watch, record)
        if not closure:
            self.guard.run("probe:numerics", self.numerics.before_step, watch, record)
        if self.guarding is not None and self._is_kept_from(optimizer, watch, record):
            return
        self._pre = (watch, record, time.perf_counter())

    def _is_kept_from(self, optimizer: torch.optim.Optimizer, watch: OptimizerWatch, record: StepRecord) -> bool:
        """Let the numeric guard decide about the step; return True when the run ends here."""
        assert self.guarding is not None
        if record.flags & Flag.CLOSURE:
            self.guarding.tell_unguarded()
            return False
        ends = bool(self.guard.run("probe:guard", self.guarding.keeps_from, optimizer, watch, record))
        if ends:
            self._stepping.clear()
            self._finish(watch, record)
            self._halt = self.guarding.error()
        return ends

    def post_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Look at parameters and state just after the step, and hand the record over."""
        if id(optimizer) not in self._stepping:
            return
        while self._stepping and self._stepping.pop() != id(optimizer):
            pass
        if self._stepping or self._pre is None or self.in_backward:
            return
        watch, record, started = self._pre
        self._pre = None
        record.fields["optimizer_seconds"] = time.perf_counter() - started
        if record.flags & Flag.CHECKED and record.flags & Flag.CLOSURE:
            self.guard.run("probe:step-gradients", notes.note_gradients, self.window, watch, record)
            self.guard.run("probe:numerics", self.numerics.before_step, watch, record)
        self._finish(watch, record)

    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that GradScaler did not let happen; it counts as an attempt."""
        watch = self._watch(optimizer)
        if self.guarding is not None:
            self.guarding.abstain(watch)
        record = self._begin(watch)
        record.flags = (record.flags | Flag.SKIPPED) & ~Flag.CHECKED
        self._finish(watch, record)

    def _watch(self, optimizer: torch.optim.Optimizer) -> OptimizerWatch:
        watch = self._by_optimizer.get(id(optimizer))
        if watch is None or (watch.ref is not None and watch.ref() is not optimizer):
            watch = OptimizerWatch(optimizer, index_of(optimizer, self.watches), self.entries)
            watch.step = first_step(optimizer, self.watches)
            watch.on_end = self._ended
            self.forget()
            self.watches.append(watch)
            self._by_optimizer[id(optimizer)] = watch
        watch.step = max(w.step for w in self.watches if w.index == watch.index)
        return watch

    def _ended(self, watch: OptimizerWatch) -> None:
        self.look_back(watch)
        self.last_look(watch)

    def look_back(self, *watches: OptimizerWatch) -> None:
        """Hand over what the last steps have left, of all optimizers unless some are named: they may step no more."""
        for watch in watches or self.watches:
            loaded = bool(self.window.loads)
            self.guard.run("probe:last-state", self.last_state.look, watch, loaded)

    def pause(self) -> None:
        """Look back where training pauses, unless the next step is checked: the script may rewrite the model next."""
        for watch in self.watches:
            if watch.mark is not None and not self._due(watch.index, watch.step):
                self.guard.run("probe:last-state", self.last_state.glance_back, watch)

    def next_step(self) -> int:
        """Return the number of the optimizer step that the rank is heading for."""
        return max((watch.step for watch in self.watches), default=0)

    def watch_of(self, index: int) -> OptimizerWatch:
        """Return the newest watch with this number."""
        return next(watch for watch in reversed(tuple(self.watches)) if watch.index == index)

    def _begin(self, watch: OptimizerWatch) -> StepRecord:
        changed = watch.refresh(self.wrappers)
        if changed:
            self.guard.run("probe:gradients", self._hook, watch)
            if not any(watch.owned):
                self.adopt(watch.params)
        flags = Flag.FIRST if watch.step == 0 else Flag(0)
        if (self.checking or self._due(watch.index, watch.step)) and not self.window.cut:
            flags |= Flag.CHECKED
        flags |= contract.flags(watch) | (Flag.LOCAL_ONLY if self.averaged else Flag(0))
        record = StepRecord(watch.index, watch.step, flags, self.window)
        record.names, record.owned = watch.names, watch.owned
        record.ids, record.slots = watch.ids, watch.slots
        record.hyper = self.guard.run("probe:hyper", watch.hyper) or ()
        record.contract = contract.facts(watch, wrappers=len(self.wrappers), world=self.world)
        if (rate := self.guard.run("probe:hyper", watch.lr)) is not None:
            record.fields["lr"] = rate
        record.fields["without_grad"] = sum(p.requires_grad and p.grad is None for p in watch.params)
        return record

    def _hook(self, watch: OptimizerWatch) -> None:
        for p, owner in zip(watch.params, watch.owners, strict=True):
            self.hooks.add(p, owner)

    def _finish(self, watch: OptimizerWatch, record: StepRecord) -> None:
        run = self.guard.run
        if record.flags & Flag.CHECKED:
            run("probe:parameters", notes.note_after, watch, record)
            keys, tensors = run("probe:state", notes.note_state, watch, record) or ((), ())
            run("probe:numerics-after", self.numerics.after_step, watch, record, keys, tensors)
            if self.want_norms:
                run("probe:parameters", self._note_norms, watch, record, tensors)
            run("probe:frozen", notes.note_frozen, watch, record, self.watches, self.wrappers)
            if record.optimizer == 0 and self.world > 1 and not self.entries.threads.several:
                run("probe:replicas", self.replicas.note, record, self.wrappers, self.watches)
        for wrapper in watch.wrappers:
            ddp = wrapper.ref()
            if ddp is not None and record.flags & Flag.CHECKED and not internals.broadcasts_buffers(ddp):
                run("probe:buffers", self.buffers.note, ddp)
            wrapper.pending = None
        memory_now = run("probe:memory", self.memory.end_step, watch.step) or {}
        record.fields.update({**self._numbers(), **memory_now})
        record.loss_scale = self.events.last_loss_scale
        self.after_step(watch, watch.step)
        self.window.looks.let_go()
        if self.world > 1:
            self.guard.run("probe:last-state", self.last_state.mark, watch, record)
        self._emit(record)
        self.guard.run("probe:scene", self.scenes.next_step)
        watch.step += 1
        self.window = Window(
            started=time.perf_counter(), overhead_before=self.guard.elapsed(), number=max(w.step for w in self.watches)
        )
        self.checking = any(self._due(w.index, w.step) for w in self.watches)

    @staticmethod
    def _note_norms(watch: OptimizerWatch, record: StepRecord, tensors: Sequence[torch.Tensor]) -> None:
        record.norms = device.numbers([gradients.norm_of(t) for t in (*watch.params, *tensors)])

    def _numbers(self) -> dict[str, Any]:
        w = self.window
        return {
            "backwards": self.backwards,
            "syncs": self.syncs,
            "micro_batches": w.micro_batches,
            "step_seconds": time.perf_counter() - w.started,
            "data_seconds": w.data_seconds,
            "forward_seconds": w.forward_seconds,
            "backward_seconds": w.backward_seconds,
            "overhead_seconds": self.guard.elapsed() - w.overhead_before,
        }

    # --- optimizers that step inside backward -------------------------------------------------------------------------

    def _fuse(self, optimizer: torch.optim.Optimizer) -> None:
        if self.guarding is not None:
            self.guarding.tell_unguarded()
        if self._fused is None:
            self._fused = OptimizerWatch(None, len({w.index for w in self.watches}), self.entries)
            self.watches.append(self._fused)
        if all(ref() is not optimizer for ref in self._fused.members):
            self._fused.members.append(weakref.ref(optimizer))
        self._fused_stepped = True

    def _finish_fused(self) -> None:
        self._fused_stepped = False
        assert self._fused is not None
        record = self._begin(self._fused)
        self.guard.run("probe:numerics", self.numerics.before_step, self._fused, record)
        self._finish(self._fused, record)
