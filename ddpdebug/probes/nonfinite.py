"""Searches for NaN and Inf through one step: inputs, module outputs, loss, gradients, parameters, optimizer state.

Checked steps are looked at as they run; a loss that is non-finite on the CPU is looked into in any step. On the CPU all
is judged on the training thread just before the optimizer changes anything: there the inputs, the parameters and the
random state of the bad step are still at hand, and who hears of `NonfiniteMade` may replay it. On a device nothing is
waited for: what was measured is judged in the background thread, a little later.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import location, user_frame
from ddpdebug.probes import async_copy as device, inputs, loss_line, ranges, training_events as events
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.entry import watch_entry
from ddpdebug.probes.forward_capture import ForwardCaptures
from ddpdebug.probes.layer_statistics import MAX_CALLS, Layers, LayerSamples
from ddpdebug.probes.loop_calls import LoopCalls, Losses
from ddpdebug.probes.module_outputs import ForwardProbe
from ddpdebug.probes.nonfinite_detail import complete, is_bad_call, summary
from ddpdebug.probes.nonfinite_notes import Judgement, Looks
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.step_digests import GradientDigests, ParameterDigests
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus
from ddpdebug.schema.details import NonfiniteLoss, NonfiniteParameters
from ddpdebug.schema.row import Flag
from ddpdebug.torch_internals import graph

_MAX_OUTPUTS = 32
#: Names of parameters that are reported of a step, and lines that are known.
MAX_NAMES = 64
#: Parameters and state up to this size are looked at after every checked step; of larger ones a share in turn.
_SMALL_BYTES = 4 << 20
_SHARES = 8
#: Parameters up to this size are looked at before every checked step as well, which tells who changed them.
_TINY_BYTES = 1 << 20
_HALVES = frozenset({torch.float16, torch.bfloat16})


class Numerics:
    """The probe for non-finite numbers of one rank.

    Args:
        calls: knows the loss scale.
        captures: keeps the forwards for a replay.
        on: false looks at nothing (`--guard off`).
        every_step: a vote on each step wants to know of every step.
        looks_at_all: tells whether a check looks at all modules, however many there are.
    """

    def __init__(  # noqa: PLR0913 - what it depends on
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        calls: LoopCalls,
        captures: ForwardCaptures,
        *,
        on: bool = True,
        every_step: bool = False,
        looks_at_all: Callable[[], bool] = lambda: False,
    ) -> None:
        self.inside = False  # a forward that is looked at is running
        self._began: Looks | None = None  # where that forward is noted
        self._bus, self._state, self._guard, self._calls, self._captures = bus, state, guard, calls, captures
        self._on, self._every_step = on, every_step
        self.layers = Layers()
        self._samples = False  # layers are sampled in this forward
        self._probe = ForwardProbe(guard, looks_at_all)
        self._habits: dict[str, set[str]] = {}  # module -> kinds of non-finite output that healthy steps have too
        self._clean: dict[int, int] = {}  # optimizer -> last step whose gradients were seen to be finite
        self._bad: dict[int, int] = {}  # optimizer -> last step that was not
        self._known: dict[int, set[str]] = {}  # optimizer -> parameters and state that are non-finite already
        self._compiled = False
        self._verified: dict[int, int] = {}  # optimizer -> last step before which all parameters were looked at
        self._left: dict[int, int] = {}  # optimizer -> last step that left only finite parameters, as far as all
        self._lines: dict[tuple[str, int], str | None] = {}
        guard.when_off("probe:numerics-forward", self.abort)
        guard.when_off("probe:numerics", self.abort)
        guard.needs("probe:numerics-gradients", "probe:gradients")
        guard.needs("probe:layers", "probe:modules", "probe:numerics-forward")  # when a sample begins and ends
        guard.needs("probe:numerics-after", "probe:numerics", "probe:state")  # which judges the step before
        bus.on("probe:numerics-forward", events.ForwardBegan, self._forward_begins)
        bus.on("probe:numerics-forward", events.ForwardEnded, self._forward_ends)
        bus.on("probe:numerics-forward", events.ForwardFailed, self._forward_fails)
        bus.on("probe:numerics-forward", events.ModuleForwardBegan, self._module_begins)
        bus.on("probe:numerics-forward", events.ModuleForwardEnded, self._forward_ends)
        bus.on("probe:numerics-forward", events.ModuleForwardFailed, self._forward_fails)
        bus.on("probe:numerics-loss", events.LossGiven, self.note_loss)
        bus.on("probe:numerics", events.GradientsFinal, self.before_step)
        bus.on("probe:numerics-after", events.StateRead, self.after_step)

    # --- forward ------------------------------------------------------------------------------------------------------

    def _forward_begins(self, event: events.ForwardBegan) -> None:
        wrapper = self._state.wrapper_of(event.ddp)
        prefix = f"ddp{wrapper.index}." if wrapper is not None and len(self._state.wrappers) > 1 else ""
        self._begin(event.ddp.module, prefix, event.args, event.kwargs)

    def _module_begins(self, event: events.ModuleForwardBegan) -> None:
        self._begin(event.module, "", event.args, event.kwargs)

    def _begin(self, module: torch.nn.Module, prefix: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Look at the inputs of a training forward that begins now, and at its module calls."""
        state = self._state
        if not self._on or not torch.is_grad_enabled():
            return
        self.inside = True
        looks = state.since.parts[Looks]
        inner = internals.unwrap_compiled(module)
        looks.module, looks.prefix, looks.model = weakref.ref(inner), prefix, type(inner).__name__
        self._began = looks
        if not state.checking:
            return
        if not looks.inputs:
            looks.inputs = inputs.bad(inner, args, kwargs)
        if (later := inputs.bad_later(inner, args, kwargs)) is not None:
            looks.later_inputs.append(later)
        turns, step = self._probe.turns(inner), state.next_step()
        layers = None if turns is None else turns.layers(MAX_CALLS)
        self._samples = bool(self._guard.run("probe:layers", self.layers.begin, state.since, inner, layers))
        self._compiled = self._compiled or internals.anything_compiled()  # a reset of the compiler forgets it
        if self._compiled:
            looks.compiled = True
            return
        modules = None if turns is None else [*turns.now(step), *(layers or () if self._samples else ())]
        self._probe.begin(looks, step, self.layers.look if self._samples else None, modules)

    def _forward_ends(self, event: events.ForwardEnded | events.ModuleForwardEnded) -> None:
        """Look at what the forward returned."""
        looks = self._state.since.parts[Looks]
        if not self.inside:
            return
        if looks is not self._began or looks.module is None:  # the optimizer has stepped inside this forward
            self.abort()
            return
        self.inside = False
        root = looks.module()
        if root is not None:
            self._probe.end(root, looks.prefix)
            if self._samples:
                self._samples = False
                turns = self._probe.turns(root)
                names = None if turns is None else turns.names
                self._guard.run("probe:layers", self.layers.end, root, looks.prefix, event.outputs(), names)
        looks.forwards += 1
        tensors = event.outputs()[:_MAX_OUTPUTS]
        looks.outputs = [internals.Memory(tensor) for tensor in tensors if internals.is_plain(tensor)]
        if not self._state.checking:
            return
        for tensor in tensors:
            if tensor.device.type == "cpu" and (seen := ranges.read(tensor)) is not None:
                looks.output_finite = looks.output_finite is not False and all(map(math.isfinite, seen))
            elif (there := ranges.look(tensor)) is not None:
                looks.later_outputs.append(there)
        watch_entry(tensors, looks, self._guard, self.locate)

    def locate(self, looks: Looks) -> None:
        """Record the line that made a loss whose gradient turns out to be non-finite; runs in its backward."""
        if looks.loss_line is None:
            looks.loss_line = self.expression(user_frame())

    def _forward_fails(self, _: events.ForwardFailed | events.ModuleForwardFailed) -> None:
        self.abort()

    def abort(self) -> None:
        """Stop observing a forward that raised."""
        self.inside = False
        self._probe.abort()
        self.layers.forget()

    # --- backward -----------------------------------------------------------------------------------------------------

    def note_loss(self, event: events.LossGiven) -> None:
        """Record the line of a loss: on the CPU of a non-finite one, on a device of any, which is judged later."""
        looks, loss = self._state.since.parts[Looks], event.loss
        if not self._on or looks.loss is not None:
            return
        here = loss.device.type == "cpu"
        value = event.read() if here else math.nan
        if math.isfinite(value) and here and self._state.checking:
            self._bus.emit(events.LossExamined(loss, looks, finite=True))
        if math.isfinite(value):
            return
        if here:
            self._suspect()
        frame = user_frame()
        looks.loss = NonfiniteLoss(
            value=value,
            micro_batch=self._state.since.micro_batches,
            backward=None if frame is None else location(frame.f_code.co_filename, frame.f_lineno),
            expression=self.expression(frame),
            operation=None if loss.grad_fn is None else graph.name_of(loss.grad_fn),
        )
        if here:
            self._bus.emit(events.LossExamined(loss, looks, finite=False))

    def expression(self, frame: Any) -> str | None:
        """Return the line that made the loss on which a frame calls backward; None if unknown."""
        if frame is None:
            return None
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in self._lines and len(self._lines) < MAX_NAMES:
            self._lines[key] = self._guard.run("probe:loss_line", loss_line.expression, frame)
        return self._lines.get(key)

    def note_local(self, noted: Sequence[tuple[Wrapper, int, torch.Tensor, torch.Tensor]]) -> None:
        """Check gradients that are still this rank's own, on the CPU; their norms are given."""
        noted = [row for row in noted if row[2].is_cpu]
        if not self._on or not noted:
            return
        looks = self._state.since.parts[Looks]
        for (wrapper, key, grad, _), norm in zip(noted, device.numbers([norm for *_, norm in noted])(), strict=True):
            halved = wrapper.hook_kind in {"half", "custom"}  # 16 bits may reduce it
            if (halved or grad.dtype in _HALVES) or not math.isfinite(norm):
                self._look_at_local(looks, key, grad)

    def _look_at_local(self, looks: Looks, key: int, grad: torch.Tensor) -> None:
        seen = ranges.read(grad)  # a norm overflows before its elements do
        if seen is None:
            return
        if not all(map(math.isfinite, seen)):
            if not looks.local:
                self._suspect()
            if key not in looks.local:
                looks.local.append(key)
            return
        looks.largest[key] = max(looks.largest.get(key, 0.0), seen[1], -seen[0])
        if ranges.near_limit(grad.dtype, *seen) is not None:
            looks.near_gradients[key] = (looks.largest[key], torch.finfo(grad.dtype).max)

    def _suspect(self) -> None:
        """Keep the newest forward's inputs for the replay, where there will be one: not in every step of a bad run."""
        step = self._state.next_step()
        if step - 1 not in self._bad.values():
            self._guard.run("probe:scene", self._captures.suspect)

    # --- optimizer step -----------------------------------------------------------------------------------------------

    def before_step(self, event: events.GradientsFinal) -> None:
        """Judge the step that the optimizer is about to take; nothing has changed yet."""
        if not self._on:
            return
        watch, record = event.watch, event.record
        self._guard.run("probe:layers", self.layers.before, watch, record)
        looks, judgement = record.since.parts[Looks], record.parts[Judgement]
        record.since.parts[Losses].scale = self._calls.last_loss_scale
        looks.called = self._called(looks)
        if self._is_scaler_skipping(watch):
            record.flags |= Flag.SKIPPED
        if not watch.on_cpu:
            if self._every_step:
                self._wait_for_device(watch, record)
            judgement.later = complete(record, looks)
            return
        reduced = self._reduced(watch, record)
        judgement.certain = True
        record.flags |= Flag.LOCAL_GRADS_NONFINITE if looks.local else Flag(0)
        record.flags |= Flag.GRADS_NONFINITE if reduced else Flag(0)
        if reduced and "probe:numerics-gradients" in self._guard.off:  # made by whom, nobody has seen
            record.checked = False
        gradients = bool(looks.local or reduced)
        self._learn(looks, healthy=looks.loss is None and not gradients)
        guilty = bool(looks.loss or looks.local or any([is_bad_call(c) and not c.usual for c in looks.forward]))
        before = self._before(watch, record, thoroughly=guilty or gradients)
        if guilty or gradients or before or looks.noteworthy:
            flags, judgement.detail = summary(record, looks)
            record.flags |= flags | (Flag.PARAMS_NONFINITE if before else Flag(0))
            self._investigate(record, looks, reduced=reduced, before=before)
        if guilty and not record.flags & Flag.SKIPPED and self._bad.get(watch.index, -2) < watch.step - 1:
            # once: the steps after a bad one are bad as well, and show nothing new
            self._bus.emit(events.NonfiniteMade(watch, record))
        if guilty or gradients:
            self._bad[watch.index] = watch.step
        if not gradients and (record.checked or self._every_step):
            self._clean[watch.index] = watch.step

    def may_be_new(self, watch: OptimizerWatch) -> bool:
        """Return whether parameters found non-finite now would be a new observation."""
        return self._on and not self._known.get(watch.index)

    def _called(self, looks: Looks) -> tuple[str, int] | None:
        """Return the file and the line that called the model."""
        capture = self._captures.newest(None if looks.module is None else looks.module())
        return None if capture is None else capture.called_at

    @staticmethod
    def _is_scaler_skipping(watch: OptimizerWatch) -> bool:
        """Return whether an optimizer that is stepped anyway has been told by GradScaler to change nothing (fused)."""
        verdicts = [found for o in watch.optimizers() if (found := internals.found_inf_of(o)) is not None]
        return any([bool(found) for found in verdicts if found.device.type == "cpu"])

    def _wait_for_device(self, watch: OptimizerWatch, record: StepRecord) -> None:
        """Learn now what the guard has to know: the one place that waits for a device, and only if asked to guard."""
        if self._reduced(watch, record):
            record.flags |= Flag.GRADS_NONFINITE
        if any([not math.isfinite(read()) for read in record.since.parts[Losses].given]):
            record.flags |= Flag.LOSS_NONFINITE

    def _reduced(self, watch: OptimizerWatch, record: StepRecord) -> list[int]:
        """Return the positions of the gradients that are non-finite as the optimizer finds them, as far as is known."""
        known = record.parts.get(GradientDigests) if record.checked else None
        looks = record.since.parts[Looks]
        if known is not None and known.digests is not None:
            norms = known.reduced()
            known.reduced = lambda: norms
            untouched = {*known.reduced_summed} - {*known.touched}
            odd = [i for i, n in zip(known.reduced_summed, norms, strict=False) if not math.isfinite(n)]
            suspects = [i for i in odd if i in untouched]
            suspects += [i for i, n in zip(known.touched, known.touched_norms(), strict=True) if not math.isfinite(n)]
        elif self._every_step or looks.loss or looks.local:
            suspects = list(range(len(watch.params)))
        else:
            return []
        some = [(i, grad) for i in suspects if (grad := watch.params[i].grad) is not None]
        return sorted(some[i][0] for i in ranges.nonfinite([grad for _, grad in some]))

    def _learn(self, looks: Looks, *, healthy: bool) -> None:
        """Mark what healthy steps show as well, and remember what this one does."""
        habits = [self._habits.setdefault(call.module, set()) for call in looks.forward]
        looks.forward = [
            replace(call, usual=bool(known) and known.issuperset(call.kinds))
            for call, known in zip(looks.forward, habits, strict=True)
        ]
        if healthy:
            for call, known in zip(looks.forward, habits, strict=True):
                known.update(call.kinds)

    def _before(self, watch: OptimizerWatch, record: StepRecord, *, thoroughly: bool) -> list[str]:
        """Return the parameters that are non-finite although no optimizer has touched them in this step.

        All are looked at in the first step and where something is wrong, those of the optimizer where they are few,
        otherwise those that were bad before.
        """
        known = self._known.get(watch.index)
        small = record.checked and sum(p.nbytes for p in watch.params) <= _TINY_BYTES
        thoroughly = thoroughly or bool(record.flags & Flag.FIRST)
        if record.flags & Flag.CLOSURE or not watch.has_raw_gradients or not (thoroughly or small or known):
            return []
        if thoroughly or small:
            self._verified[watch.index] = watch.step
        if small and not thoroughly:
            return [watch.names[i] for i in ranges.nonfinite(watch.params)]
        module = record.since.parts[Looks].module
        root = module() if module is not None else None
        rows = list(zip(watch.names, watch.params, strict=True))
        own = {id(p) for p in watch.params}
        rows += [(n, p) for n, p in internals.named_parameters(root) if id(p) not in own] if root is not None else []
        rows = [(name, p) for name, p in rows if thoroughly or (known and name in known)]
        return [rows[i][0] for i in ranges.nonfinite([p for _, p in rows])]

    def _investigate(self, record: StepRecord, looks: Looks, *, reduced: Sequence[int], before: Sequence[str]) -> None:
        """Complete the detail of a step in which something is wrong."""
        found: dict[str, Any] = {}
        if looks.output_finite is None:
            outputs = [t for memory in looks.outputs if (t := memory.tensor()) is not None]
            spans = [span for t in outputs if (span := ranges.read(t)) is not None]
            found["output_finite"] = all([math.isfinite(n) for span in spans for n in span]) if spans else None
        module = None if looks.module is None else looks.module()
        capture = self._captures.likeliest(module)
        if not looks.inputs and looks.loss is not None and module is not None and capture is not None:
            looks.inputs = inputs.bad(module, capture.args, capture.kwargs)
            found["inputs"] = tuple(looks.inputs)
            record.flags |= Flag.INPUT_NONFINITE if looks.inputs else Flag(0)
        found["reduced"] = tuple([record.names[i] for i in reduced])[:MAX_NAMES]
        if before:
            phase = None
            index, step = record.optimizer, record.step
            digests = record.parts.get(ParameterDigests)
            touched = digests is not None and digests.changed_outside()
            if touched or self._left.get(index) == step - 1 >= 0:
                phase = "outside-optimizer"
            elif self._clean.get(index) == step - 1 >= 0:
                phase = "optimizer"
            new = [name for name in before if name not in self._known.get(index, ())]
            self._known.setdefault(index, set()).update(before)
            names = tuple(new or before)[:MAX_NAMES]
            found["parameters"] = NonfiniteParameters(before=names, phase=phase)
        judgement = record.parts[Judgement]
        judgement.detail = replace(judgement.detail, **found)

    def after_step(self, event: events.StateRead) -> None:
        """Check parameters and state after a step with finite gradients."""
        watch, record, keys, tensors = event.watch, event.record, event.keys, event.tensors
        self._guard.run("probe:layers", self.layers.after, watch, record.parts.get(LayerSamples))
        judgement = record.parts.get(Judgement)
        if judgement is None or not judgement.certain or record.flags & (Flag.GRADS_NONFINITE | Flag.SKIPPED):
            return
        paths: list[tuple[str, ...]] = [(name,) for name in watch.names]
        paths += keys
        every = [*watch.params, *tensors]
        if sum([t.nbytes for t in every]) > _SMALL_BYTES:
            turn = record.step % _SHARES
            own = {n for n, key in zip(watch.names, watch.ids, strict=True) if watch.slots[key] % _SHARES == turn}
            some = [i for i, path in enumerate(paths) if path[0] in own]
            paths, every = [paths[i] for i in some], [every[i] for i in some]
        else:
            self._left[watch.index] = watch.step
        bad = [paths[i] for i in ranges.nonfinite(every)]
        known = self._known.setdefault(watch.index, set())
        new = [key for key in bad if ":".join(key) not in known]
        known.update(":".join(key) for key in bad)
        if bad:
            self._left.pop(watch.index, None)
        if not new:
            return
        record.flags |= Flag.STEP_NONFINITE
        detail = judgement.detail
        if detail.parameters is None:
            _, detail = summary(record, record.since.parts[Looks])
        parameters = NonfiniteParameters(
            before=() if detail.parameters is None else detail.parameters.before,
            after=tuple([key[0] for key in new if len(key) == 1])[:MAX_NAMES],
            state=tuple([(key[0], key[1]) for key in new if len(key) == 2])[:MAX_NAMES],
            phase="optimizer" if self._verified.get(watch.index) == watch.step else None,
        )
        judgement.detail = replace(detail, parameters=parameters)
