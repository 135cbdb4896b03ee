"""Replays one kept forward and backward, and names the operation that made the first non-finite value.

The inner module runs, not the wrapper: nothing is reduced. An operation that would communicate ends the replay instead.
What the module changes stays changed: this runs in a process that is there for nothing else, a disposable child of the
job (see `isolation/child.py`) or `ddpdebug replay`. It never raises: what goes wrong is the reason why the trace is not
complete.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.forensics.replay.prepared import Prepared
from ddpdebug.forensics.replay.ranges import described, is_floating, nonfinite
from ddpdebug.forensics.replay.stack_lines import ends_stack, line_of
from ddpdebug.forensics.replay.tracer import Origin, Stopped, Tracer
from ddpdebug.isolation.child import REPLAY_SECONDS, is_disposable
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import leaves, tensors_in
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.torch_internals import graph

_MAX_CALLS = 400
_SHOWN_CALLS = 12
_MAX_MASKED = 8
_MAX_NODES = 1_000_000
_REASONS = "kernels that are not deterministic, state outside of the module, or values that have changed since"


@dataclass(slots=True, kw_only=True)
class Trace:
    """The result of a replay."""

    complete: bool = False
    reason: str | None = None  # why it is not complete
    culprit: Origin | None = None
    masked: list[Origin] = field(default_factory=list)  # arose and did not reach the outputs or gradients
    calls: list[dict[str, Any]] = field(default_factory=list)  # the last module calls before the culprit
    notes: list[str] = field(default_factory=list)  # what was different from the first time, or could not be seen
    operations: int = 0
    seconds: float = 0.0
    backward: bool = False  # it was run as well
    called_at: str | None = None  # the line that calls the model

    @property
    def reproduced(self) -> bool:
        """Whether the replay produced a non-finite value."""
        return self.culprit is not None

    @property
    def location(self) -> str | None:
        """Return the user's file:line of the culprit; of the model's call if no user line has the operation."""
        lines = [line_of(entry) for entry in self.culprit.stack] if self.culprit else []
        own = [line for line in lines if "-packages/" not in line]
        return next(iter(own), self.called_at)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {
            "complete": self.complete,
            "reason": self.reason,
            "reproduced": self.reproduced,
            "culprit": None if self.culprit is None else self.culprit.to_json(),
            "location": self.location if self.culprit else None,
            "called_at": self.called_at,
            "masked": [origin.to_json() for origin in self.masked[:_MAX_MASKED]],
            "calls": self.calls,
            "notes": self.notes,
            "operations": self.operations,
            "backward": self.backward,
            "seconds": round(self.seconds, 3),
        }


def replay(
    capture: ForwardCapture,
    *,
    backward: bool = True,
    seconds: float = REPLAY_SECONDS,
    guard: Guard | None = None,
    autocast: bool = True,
) -> Trace:
    """Run a forward, and its backward, once more.

    Args:
        guard: its probes are silent meanwhile.
        autocast: false leaves autocast off even if it was on.
    """
    started = time.monotonic()
    trace = Trace(called_at=capture.location)
    was_quiet = guard.quiet if guard is not None else False
    try:
        if guard is not None:
            guard.quiet = True
        _Replay(capture, trace, started + seconds, autocast=autocast).run(backward=backward)
    except Exception as error:
        if is_users(error):
            raise
        trace.complete, trace.reason = False, _reason(error)
    finally:
        if guard is not None:
            guard.quiet = was_quiet
        trace.seconds = time.monotonic() - started
    return trace


ends_stack(replay)


class _Replay:
    """One replay while it runs."""

    def __init__(self, capture: ForwardCapture, trace: Trace, deadline: float, *, autocast: bool) -> None:
        self._capture, self._trace, self._autocast = capture, trace, autocast
        self._modules = _ModuleStack()
        self._deadline = deadline
        self._done = False

    def run(self, *, backward: bool) -> None:
        capture, trace = self._capture, self._trace
        module = capture.module()
        if module is None:
            trace.reason = "the model is gone"
            return
        module = internals.unwrap_compiled(module)
        if lost := capture.lost():
            trace.reason = f"the inputs were not kept: {'; '.join(lost[:3])}"
            return
        modes = dict(zip(capture.names, map(bool, capture.modes), strict=False))
        trace.reason = _refusal(module, modes)
        if trace.reason is not None:
            return
        self._note_differences(module)
        self._follow(Prepared(module, capture.buffers, modes), backward=backward)

    def _follow(self, prepared: Prepared, *, backward: bool) -> None:
        trace = self._trace
        tracer = Tracer(self._modules.where, self._deadline)
        with self._modules.following(prepared.module, tracer):
            try:
                self._both(tracer, prepared, backward=backward)
                trace.complete = tracer.stopped is None
            except Stopped as stopped:
                trace.reason = str(stopped)
            except Exception as error:
                if is_users(error):
                    raise
                trace.reason = _reason(error)
        trace.reason = trace.reason or tracer.stopped
        trace.operations = tracer.operations
        if not self._done:
            trace.culprit = _first(tracer.origins)
        self._tell(tracer)

    def _both(self, tracer: Tracer, prepared: Prepared, *, backward: bool) -> None:
        capture = self._capture
        args = tuple([prepared.argument(value) for value in capture.args])
        kwargs = {key: prepared.argument(value) for key, value in capture.kwargs.items()}
        _add_sources(tracer, args, kwargs, prepared)
        capture.rng.restore()
        with self._surroundings():
            with internals.as_users(), tracer:
                output = prepared.module(*args, **kwargs)
            outputs = list(tensors_in(output))
            self._trace.culprit = _blamed(tracer, outputs)
            if self._trace.culprit is None and backward:
                self._backward(outputs, args, kwargs, tracer, prepared)
        self._done = True

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self._autocast:
                stack.enter_context(self._capture.autocast.again())
            if internals.DYNAMO in sys.modules:  # what is compiled runs uncompiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def _backward(
        self, outputs: Sequence[torch.Tensor], args: Any, kwargs: Any, tracer: Tracer, prepared: Prepared
    ) -> None:
        pairs = self._gradients(outputs)
        if not pairs:
            return
        inputs = [value for _, value in leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        targets = [t for t in (*prepared.leaves(), *inputs) if t.requires_grad and t.is_leaf]
        roots = [output for _, output, _ in pairs]
        gradients = [gradient for _, _, gradient in pairs]
        inner = _inner(roots) if len(roots) > 1 and not self._capture.partial else frozenset()
        late = None  # what to blame if nothing else is
        for i, (position, _, gradient) in enumerate(pairs):
            if i not in inner:
                tracer.add_source(gradient, "output-gradient", f"output {position}", phase="backward")
                continue
            # What was recorded is the whole gradient, what flows through the other outputs included.
            gradients[i] = torch.zeros_like(gradient)
            if value := nonfinite(gradient):
                name = f"output {position}"
                late = late or Origin(-1, "output-gradient", name, "backward", value, result=described(gradient))
            else:
                roots[i].register_hook(lambda _, whole=gradient: whole)
        leaf_ids, names = _graph(roots)
        if not targets or not leaf_ids:
            self._trace.notes.append("no backward: nothing in the model has a gradient")
            return
        self._modules.enter_backward()
        if "CheckpointFunctionBackward" in names:
            if foreign := leaf_ids - {id(t) for t in targets}:
                self._trace.notes.append(f"no backward: it would reach {len(foreign)} tensors outside of the model")
                return
            with internals.as_users(), tracer:
                torch.autograd.backward(roots, gradients)
            found = [t.grad for t in targets]
        else:
            with internals.as_users(), tracer:
                found = list(torch.autograd.grad(roots, targets, gradients, allow_unused=True))
        self._trace.backward = True
        self._trace.culprit = _blamed(tracer, [t for t in found if t is not None]) or late

    def _gradients(self, outputs: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        capture, notes = self._capture, self._trace.notes
        if capture.gradients_lost:
            notes.append(f"no backward: output gradients of {capture.gradients_lost} bytes were not kept")
            return []
        pairs = []
        for position, gradient in sorted(capture.gradients.items()):
            if position >= len(outputs) or outputs[position].shape != gradient.shape:
                notes.append("no backward: the outputs have other shapes than the first time")
                return []
            output = outputs[position]
            if output.grad_fn is not None:
                pairs.append((position, output, gradient.to(output.device, output.dtype)))
        if not pairs:
            notes.append("no backward: no gradient of an output was recorded")
        return pairs

    def _note_differences(self, module: torch.nn.Module) -> None:
        capture, notes = self._capture, self._trace.notes
        if changed := capture.changed():
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            notes.append(f"written in place since the forward: {', '.join(changed[:3])}{more}")
        if capture.buffers_lost:
            notes.append(f"{capture.buffers_lost} buffers have their present values, not those before the forward")
        compiled = sum(internals.is_compiled(part) for part in internals.modules(module))
        original = capture.module()
        if compiled or (original is not None and internals.is_compiled(original)):
            notes.append("torch.compile: the uncompiled code was run; values made by fused kernels are not seen")

    def _tell(self, tracer: Tracer) -> None:
        trace = self._trace
        culprit = trace.culprit
        limit = culprit.index if culprit is not None and culprit.phase == "forward" and culprit.index >= 0 else None
        calls = [c for c in self._modules.calls if limit is None or c["operations"] < limit]
        trace.calls = [{k: v for k, v in call.items() if k != "operations"} for call in calls[-_SHOWN_CALLS:]]
        chain = {id(culprit), id(culprit.made_of) if culprit else None}
        trace.masked = [
            o for o in tracer.origins if id(o) not in chain and not o.intended and not o.weak and o.ended_at
        ]
        if trace.complete and culprit is None and not trace.masked:
            trace.notes.append(f"not reproduced: everything was finite; likely reasons are {_REASONS}")


class _ModuleStack:
    """Knows which module's forward is running, and what the last calls gave."""

    def __init__(self) -> None:
        self.calls: deque[dict[str, Any]] = deque(maxlen=_MAX_CALLS)
        self._stack: list[tuple[str, str, int]] = []
        self._counts: Counter[str] = Counter()
        self._forward = True

    @contextlib.contextmanager
    def following(self, module: torch.nn.Module, tracer: Tracer) -> Iterator[None]:
        """Hook all modules for as long as the context lasts."""
        handles = []
        for name, part in internals.named_modules(module):
            kind = type(part).__name__

            def begin(_: Any, __: Any, name: str = name, kind: str = kind) -> None:
                self._counts[name] += self._forward
                self._stack.append((name, kind, self._counts[name]))

            def end(_: Any, __: Any, output: Any, name: str = name) -> None:
                self._leave(name, output, tracer)

            handles.append(part.register_forward_pre_hook(begin, prepend=True))
            handles.append(part.register_forward_hook(end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def where(self) -> tuple[str | None, str | None, int]:
        """Return (path, class, call) of the innermost module."""
        return self._stack[-1] if self._stack else (None, None, 0)

    def enter_backward(self) -> None:
        """Count no more calls: checkpointing runs forwards again."""
        self._forward = False
        self._stack.clear()

    def _leave(self, name: str, output: Any, tracer: Tracer) -> None:
        while self._stack:
            path, kind, call = self._stack.pop()
            if path == name:
                break
        else:
            return
        if not self._forward:
            return
        tracer.muted = True
        try:
            first = next((t for t in tensors_in(output) if is_floating(t)), None)
            value = None if first is None else described(first, counts=False)
        finally:
            tracer.muted = False
        self.calls.append(
            {"module": path, "class": kind, "call": call, "output": value, "operations": tracer.operations}
        )


def _reason(error: Exception) -> str:
    """Return what is said of an error that has ended a replay."""
    text = f"{type(error).__name__}: {error}"[:500]
    if is_disposable() and isinstance(error, PermissionError):
        return f"it reaches out of the process, which is not done twice ({text})"
    return text


def _refusal(module: torch.nn.Module, modes: Mapping[str, bool]) -> str | None:
    """Return why a module cannot be run again by one rank."""
    for name, part in internals.named_modules(module):
        if kind := internals.is_parallel(part):
            return f"{name or 'the model'} is a {kind}, whose forward communicates"
        if isinstance(part, torch.jit.ScriptModule):
            return f"{name or 'the model'} is TorchScript, whose operations have no lines"
        if modes.get(name, part.training) and internals.syncs_statistics(part):
            return f"{name or 'the model'} is a SyncBatchNorm in training, whose forward communicates"
    return None


def _add_sources(tracer: Tracer, args: Any, kwargs: Any, prepared: Prepared) -> None:
    for path, value in leaves((args, kwargs)):
        if isinstance(value, torch.Tensor):
            tracer.add_source(value, "input", path)
    for name, parameter in prepared.parameters.items():
        tracer.add_source(parameter, "parameter", name)
    for name, buffer in prepared.buffers.items():
        tracer.add_source(buffer, "buffer", name)


def _blamed(tracer: Tracer, results: Sequence[torch.Tensor]) -> Origin | None:
    """Return the first origin that reaches the results and that nobody intended."""
    reached = []
    for tensor in results:
        if is_floating(tensor) and nonfinite(tensor):
            origin = tracer.origin_of(tensor)
            value = nonfinite(tensor) or "nan"
            reached.append(origin or Origin(tracer.operations, "unknown", "", "forward", value))
    return _first([origin for origin in reached if not origin.intended])


def _first(origins: Sequence[Origin]) -> Origin | None:
    """Return the origin that is to blame among several."""
    known = [origin for origin in origins if not origin.intended and origin.kind != "literal"]
    return min(known or [o for o in origins if not o.intended], key=lambda o: (o.weak, o.index), default=None)


def _inner(roots: Sequence[torch.Tensor]) -> frozenset[int]:
    """Return the positions of the outputs from which other outputs were made."""
    below = [_reached([following for following, _ in root.grad_fn.next_functions]) for root in roots if root.grad_fn]
    return frozenset(i for i, root in enumerate(roots) if any(root.grad_fn in nodes for nodes in below))


def _reached(pending: list[Any]) -> set[Any]:
    seen: set[Any] = set()
    while pending and len(seen) < _MAX_NODES:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    return seen


def _graph(roots: Sequence[torch.Tensor]) -> tuple[set[int], set[str]]:
    """Return the ids of the leaves that a backward would reach, and the names of the nodes on its way."""
    nodes = _reached([root.grad_fn for root in roots])
    variables = [graph.leaf_of(node) for node in nodes]
    return {id(variable) for variable in variables if variable is not None}, {graph.name_of(node) for node in nodes}
