"""Watches for NaN and Inf through one step: inputs, module outputs, loss, gradients, parameters, optimizer state.

Checked steps are looked at as they run; a loss that is non-finite on the CPU is looked into in any step. On the CPU all
is judged on the training thread just before the optimizer changes anything: there the inputs, the parameters and the
random state of the bad step are still at hand, and `Recorder.on_nonfinite` may replay it. On a device nothing is waited
for: what was measured is judged in the background thread, a little later.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import location, user_frame
from ddpdebug.probes import inputs, loss_line, ranges
from ddpdebug.probes.entry import watch_entry
from ddpdebug.probes.layer_statistics import Layers
from ddpdebug.probes.module_outputs import ForwardProbe
from ddpdebug.probes.nonfinite_detail import complete, is_bad_call, summary
from ddpdebug.probes.nonfinite_notes import Looks
from ddpdebug.probes.values import tensors_in
from ddpdebug.schema.details import NonfiniteLoss, NonfiniteParameters
from ddpdebug.schema.row import Flag

if TYPE_CHECKING:
    from ddpdebug.probes.optimizers import OptimizerWatch
    from ddpdebug.probes.record import StepRecord
    from ddpdebug.probes.recorder import Recorder

_MAX_OUTPUTS = 32
_MAX_NAMES = 64
#: Parameters and state up to this size are looked at after every checked step; of larger ones a share in turn.
_SMALL_BYTES = 4 << 20
_SHARES = 8
#: Parameters up to this size are looked at before every checked step as well, which tells who changed them.
_TINY_BYTES = 1 << 20
_HALVES = frozenset({torch.float16, torch.bfloat16})


class Numerics:
    """One rank's look at its numbers.

    Args:
        recorder: whose window and steps these are.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.on = True  # `--guard off` switches all of this off
        self.inside = False  # a forward that is looked at is running
        self.every_step = False  # the guard wants to know of every step
        self._recorder = recorder
        self.layers = Layers()
        self._probe = ForwardProbe(recorder.guard)
        self._habits: dict[str, set[str]] = {}  # module -> kinds of non-finite output that healthy steps have too
        self._clean: dict[int, int] = {}  # optimizer -> last step whose gradients were seen to be finite
        self._bad: dict[int, int] = {}  # optimizer -> last step that was not
        self._known: dict[int, set[str]] = {}  # optimizer -> parameters and state that are non-finite already
        self._compiled = False
        self._verified: dict[int, int] = {}  # optimizer -> last step before which all parameters were looked at
        self._left: dict[int, int] = {}  # optimizer -> last step that left only finite parameters, as far as all
        self._lines: dict[tuple[str, int], str | None] = {}

    # --- forward ------------------------------------------------------------------------------------------------------

    def begin(self, module: torch.nn.Module, prefix: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Look at the inputs of a training forward that begins now, and at its module calls."""
        recorder = self._recorder
        if not self.on or not torch.is_grad_enabled():
            return
        self.inside = True
        looks = recorder.window.looks
        inner = internals.unwrap_compiled(module)
        looks.module, looks.prefix = weakref.ref(inner), prefix
        if not recorder.checking:
            return
        if not looks.inputs:
            looks.inputs = inputs.bad(inner, args, kwargs)
        if (later := inputs.bad_later(inner, args, kwargs)) is not None:
            looks.later_inputs.append(later)
        wanted = recorder.guard.run("probe:layers", self.layers.begin, recorder.window, inner)
        self._probe.also = self.layers.look if wanted else None
        self._compiled = self._compiled or internals.anything_compiled()  # a reset of the compiler forgets it
        if self._compiled:
            looks.compiled = True
        else:
            self._probe.begin(looks, recorder.next_step())

    def end(self, output: Any) -> None:
        """Look at what the forward returned."""
        looks = self._recorder.window.looks
        if not self.inside:
            return
        self.inside = False
        assert looks.module is not None
        root = looks.module()
        if root is not None:
            self._probe.end(root, looks.prefix)
            if self._probe.also is not None:
                self._probe.also = None
                self._recorder.guard.run("probe:layers", self.layers.end, root, looks.prefix, output)
        looks.forwards += 1
        tensors = list(tensors_in(output))[:_MAX_OUTPUTS]
        looks.outputs = [weakref.ref(tensor) for tensor in tensors]
        if not self._recorder.checking:
            return
        for tensor in tensors:
            if tensor.device.type == "cpu" and (seen := ranges.read(tensor)) is not None:
                looks.output_finite = looks.output_finite is not False and all(map(math.isfinite, seen))
            elif (there := ranges.look(tensor)) is not None:
                looks.later_outputs.append(there)
        watch_entry(tensors, looks, self._recorder.guard, self.locate)

    def locate(self, looks: Looks) -> None:
        """Note the line that made a loss whose gradient turns out to be non-finite; runs in its backward."""
        if looks.loss_line is None:
            looks.loss_line = self.expression(user_frame())

    def abort(self) -> None:
        """Stop watching a forward that raised."""
        self.inside = False
        self._probe.abort()
        self.layers.forget()

    # --- backward -----------------------------------------------------------------------------------------------------

    def note_loss(self, loss: torch.Tensor, read: Callable[[], float]) -> None:
        """Note where a loss comes from: on the CPU one that is non-finite, on a device any in a checked step."""
        looks = self._recorder.window.looks
        if not self.on or looks.loss is not None:
            return
        here = loss.device.type == "cpu"
        value = read() if here else math.nan
        explain = partial(self._recorder.on_loss, loss, looks, finite=math.isfinite(value))
        if math.isfinite(value) and here and self._recorder.checking:
            self._recorder.guard.run("forensics:loss", explain)
        if math.isfinite(value) or not (here or self._recorder.checking):
            return
        if here:
            self._suspect()
        frame = user_frame()
        looks.loss = NonfiniteLoss(
            value=value,
            micro_batch=self._recorder.window.micro_batches,
            backward=None if frame is None else location(frame.f_code.co_filename, frame.f_lineno),
            expression=self.expression(frame),
            operation=None if loss.grad_fn is None else loss.grad_fn.name(),
        )
        if here and (found := self._recorder.guard.run("forensics:loss", explain)):
            looks.loss = replace(looks.loss, **found)

    def expression(self, frame: Any) -> str | None:
        """Return the line that made the loss on which a frame calls backward."""
        if frame is None:
            return None
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in self._lines and len(self._lines) < _MAX_NAMES:
            self._lines[key] = self._recorder.guard.run("probe:loss_line", loss_line.expression, frame)
        return self._lines.get(key)

    def note_local(self, key: int, grad: torch.Tensor, norm: torch.Tensor, halved: bool) -> None:  # noqa: FBT001 - called through the guard
        """Look at a gradient that is still this rank's own; `norm` is known, `halved` if 16 bits may reduce it."""
        if not self.on or grad.device.type != "cpu":
            return
        looks = self._recorder.window.looks
        if not (halved or grad.dtype in _HALVES) and math.isfinite(float(norm)):
            return
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
        step = self._recorder.next_step()
        if step - 1 not in self._bad.values():
            self._recorder.guard.run("probe:scene", self._recorder.scenes.suspect)

    # --- optimizer step -----------------------------------------------------------------------------------------------

    def before_step(self, watch: OptimizerWatch, record: StepRecord) -> None:
        """Judge the step that the optimizer is about to take; nothing has been changed yet."""
        if not self.on:
            return
        self._recorder.guard.run("probe:layers", self.layers.before, watch, record)
        looks = record.window.looks
        record.loss_scale = self._recorder.events.last_loss_scale
        if self._is_scaler_skipping(watch):
            record.flags |= Flag.SKIPPED
        if not watch.on_cpu:
            if self.every_step:
                self._wait_for_device(watch, record)
            record.numerics_later = complete(record, looks)
            return
        reduced = self._reduced(watch, record)
        record.judged = True
        record.flags |= Flag.LOCAL_GRADS_NONFINITE if looks.local else Flag(0)
        record.flags |= Flag.GRADS_NONFINITE if reduced else Flag(0)
        if reduced and "probe:numerics-gradients" in self._recorder.guard.off:  # made by whom, nobody has seen
            record.flags &= ~Flag.CHECKED
        gradients = bool(looks.local or reduced)
        self._learn(looks, healthy=looks.loss is None and not gradients)
        guilty = bool(looks.loss or looks.local or any(is_bad_call(c) and not c.usual for c in looks.forward))
        before = self._before(watch, record, thoroughly=guilty or gradients)
        if guilty or gradients or before or looks.noteworthy:
            flags, record.numerics = summary(record, looks)
            record.flags |= flags | (Flag.PARAMS_NONFINITE if before else Flag(0))
            self._investigate(record, looks, reduced=reduced, before=before)
        if guilty and not record.flags & Flag.SKIPPED and self._bad.get(watch.index, -2) < watch.step - 1:
            # once: the steps after a bad one are bad as well, and show nothing new
            found = self._recorder.guard.run("forensics:replay", self._recorder.on_nonfinite, watch, record)
            record.numerics = replace(record.numerics, replay=found)
        if guilty or gradients:
            self._bad[watch.index] = watch.step
        if not gradients and (record.flags & Flag.CHECKED or self.every_step):
            self._clean[watch.index] = watch.step

    @staticmethod
    def _is_scaler_skipping(watch: OptimizerWatch) -> bool:
        """Tell whether an optimizer that is stepped anyway has been told by GradScaler to change nothing (fused)."""
        verdicts = [found for o in watch.optimizers() if (found := internals.found_inf_of(o)) is not None]
        return any(bool(found) for found in verdicts if found.device.type == "cpu")

    def _wait_for_device(self, watch: OptimizerWatch, record: StepRecord) -> None:
        """Learn now what the guard has to know: the one place that waits for a device, and only if asked to guard."""
        if self._reduced(watch, record):
            record.flags |= Flag.GRADS_NONFINITE
        if any(not math.isfinite(read()) for read in record.window.losses):
            record.flags |= Flag.LOSS_NONFINITE

    def _reduced(self, watch: OptimizerWatch, record: StepRecord) -> list[int]:
        """Return the positions of the gradients that are non-finite as the optimizer finds them, as far as is known."""
        if record.flags & Flag.CHECKED and record.grads is not None:
            norms = record.reduced() if record.reduced is not None else []
            record.reduced = lambda norms=norms: norms
            touched = record.touched_norms() if record.touched_norms is not None else []
            untouched = {*record.reduced_summed} - {*record.touched}
            odd = [i for i, n in zip(record.reduced_summed, norms, strict=False) if not math.isfinite(n)]
            suspects = [i for i in odd if i in untouched]
            suspects += [i for i, n in zip(record.touched, touched, strict=True) if not math.isfinite(n)]
        elif self.every_step or record.window.looks.loss or record.window.looks.local:
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

        All are looked at where they are few, in the first step and where something is wrong, otherwise those that were
        bad before.
        """
        known = self._known.get(watch.index)
        small = record.flags & Flag.CHECKED and sum(p.nbytes for p in watch.params) <= _TINY_BYTES
        thoroughly = thoroughly or bool(record.flags & Flag.FIRST or small)
        if record.flags & Flag.CLOSURE or watch.ref is None or not (thoroughly or known):
            return []
        if thoroughly:
            self._verified[watch.index] = watch.step
        module = record.window.looks.module
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
            outputs = [t for ref in looks.outputs if (t := ref()) is not None]
            spans = [span for t in outputs if (span := ranges.read(t)) is not None]
            found["output_finite"] = all(math.isfinite(n) for span in spans for n in span) if spans else None
        module = None if looks.module is None else looks.module()
        scene = self._recorder.scenes.likeliest(module)
        if not looks.inputs and looks.loss is not None and module is not None and scene is not None:
            looks.inputs = inputs.bad(module, scene.args, scene.kwargs)
            found["inputs"] = tuple(looks.inputs)
            record.flags |= Flag.INPUT_NONFINITE if looks.inputs else Flag(0)
        found["reduced"] = tuple(record.names[i] for i in reduced)[:_MAX_NAMES]
        if before:
            phase = None
            index, step = record.optimizer, record.step
            glances = None if record.before_glance is None else record.before_glance()
            touched = glances is not None and list(record.previous or glances) != glances
            if touched or self._left.get(index) == step - 1 >= 0:
                phase = "outside-optimizer"
            elif self._clean.get(index) == step - 1 >= 0:
                phase = "optimizer"
            new = [name for name in before if name not in self._known.get(index, ())]
            self._known.setdefault(index, set()).update(before)
            names = tuple(new or before)[:_MAX_NAMES]
            found["parameters"] = NonfiniteParameters(before=names, phase=phase)
        record.numerics = replace(record.numerics, **found)

    def after_step(
        self,
        watch: OptimizerWatch,
        record: StepRecord,
        keys: Sequence[tuple[str, str]],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Look at what a step with finite gradients has left behind; `keys` and `tensors` are the state."""
        self._recorder.guard.run("probe:layers", self.layers.after, watch, record)
        if not self.on or not record.judged or record.flags & (Flag.GRADS_NONFINITE | Flag.SKIPPED):
            return
        rows: list[tuple[tuple[str, ...], torch.Tensor]] = [
            ((name,), p) for name, p in zip(watch.names, watch.params, strict=True)
        ]
        rows += [((name, key), t) for (name, key), t in zip(keys, tensors, strict=True)]
        if sum(t.nbytes for _, t in rows) > _SMALL_BYTES:
            turn = record.step % _SHARES
            slots = {name: watch.slots[id(p)] for name, p in zip(watch.names, watch.params, strict=True)}
            rows = [(key, t) for key, t in rows if slots.get(key[0], 0) % _SHARES == turn]
        else:
            self._left[watch.index] = watch.step
        bad = [rows[i][0] for i in ranges.nonfinite([t for _, t in rows])]
        known = self._known.setdefault(watch.index, set())
        new = [key for key in bad if ":".join(key) not in known]
        known.update(":".join(key) for key in bad)
        if bad:
            self._left.pop(watch.index, None)
        if not new:
            return
        record.flags |= Flag.STEP_NONFINITE
        detail = record.numerics
        if detail.parameters is None:
            _, detail = summary(record, record.window.looks)
        parameters = NonfiniteParameters(
            before=() if detail.parameters is None else detail.parameters.before,
            after=tuple(key[0] for key in new if len(key) == 1)[:_MAX_NAMES],
            state=tuple((key[0], key[1]) for key in new if len(key) == 2)[:_MAX_NAMES],
            phase="optimizer" if self._verified.get(watch.index) == watch.step else None,
        )
        record.numerics = replace(detail, parameters=parameters)
