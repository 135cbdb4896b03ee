"""The state of the newest training forwards that a replay needs. Never waits for a device.

The memory of inputs and of output gradients is held while all of it together stays within a bound (see `holding`), and
otherwise known for as long as the job has it; a later in-place change shows in the version counters. No tensor of the
job's is held or referred to, no output and no graph. Small things are copied: random state, and the buffers that
forward writes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.process_state import Autocast, RandomState
from ddpdebug.isolation.user_code import location, user_frame
from ddpdebug.nested import leaves, tensors_in
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.holding import (
    BOUND,
    Counted,
    Kept,
    KeptTensor,
    Lost,
    Room,
    fetch,
    hold,
    is_ours_to_keep,
    size_text,
    storage_of,
)
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import (
    Bus,
    ForwardEnded,
    ForwardPrepared,
    ModuleForwardBegan,
    ModuleForwardEnded,
    StepClosed,
    StepPassed,
)

#: Micro-batches of one step that are kept.
MAX_CAPTURES = 8
#: Beyond so many forwards in a step none is kept: they are small, and to keep each takes longer than to run it.
_MOST_FORWARDS = 256
_BUFFER_BYTES = 1 << 20
_MAX_VERSIONS = 16
#: Buffers that are copied in a step that is not checked.
_MAX_BUFFERS = 256
_REFRESH = 100


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class ForwardCapture:
    """One training forward. `module` returns the module while it lives."""

    module: Callable[[], torch.nn.Module | None]
    step: int
    given: tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs, as `hold` returns them
    rng: RandomState
    autocast: Autocast
    names: tuple[str, ...] = ()  # of the modules, in the order of `modes`
    read_modes: Callable[[], bytes] = bytes
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # copies, of those that forward writes
    buffers_lost: int = 0  # buffers that forward writes and that were too large to copy
    versions: list[tuple[str, Callable[[], int | None], int]] = field(default_factory=list)  # name, now, then
    called_at: tuple[str, int] | None = None  # file and line of the call
    caller: tuple[CodeType, Mapping[str, Any]] | None = None  # the function around that line, and its globals
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # by the output's position
    gradients_lost: int = 0  # bytes
    partial: bool = False  # an output's gradient lacks what flows through the other outputs
    number: int = 0  # in its step, from 0
    after: int = 0  # the number of the first autograd node that was made after the forward
    ended: bool = False
    kept: list[KeptTensor] = field(default_factory=list)  # in `given`
    pieces: dict[int, int] = field(default_factory=dict)  # memory that is held: address -> bytes
    suspected: bool = False  # its inputs are held whatever their size, until the step is over

    @property
    def args(self) -> tuple[Any, ...]:
        """Return the positional arguments that still exist, with `Lost` in place of the others."""
        return tuple([fetch(value) for value in self.given[0]])

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the named arguments that still exist, with `Lost` in place of the others."""
        return {key: fetch(value) for key, value in self.given[1].items()}

    @property
    def modes(self) -> bytes:
        """Return train/eval of every module: at the time of a checked forward, otherwise as it is now."""
        return self.read_modes()

    @property
    def location(self) -> str | None:
        """Return `file:line` of the forward's call."""
        return None if self.called_at is None else location(*self.called_at)

    def changed(self) -> list[str]:
        """Return the names of inputs and parameters that were written in place since the forward."""
        return [name for name, read, version in self.versions if (now := read()) is not None and now != version]

    def lost(self) -> list[str]:
        """Return the arguments that were not kept, with reasons."""
        return [f"{path}: {value.what}" for path, value in leaves((self.args, self.kwargs)) if is_a(value, Lost)]


class ForwardCaptures:
    """The forwards of the current step, and of the step before it.

    Args:
        guard: what its hooks run under.
        limit: bytes of inputs, output gradients and buffers that are held of all of them together.
    """

    def __init__(self, guard: Guard, limit: int = BOUND) -> None:
        self.guard = guard
        self.current: deque[ForwardCapture] = deque()
        self.previous: deque[ForwardCapture] = deque()
        self.dropped = 0  # micro-batches of the current step that are no longer kept
        self.room = Room(limit)
        self._models: dict[int, _Model] = {}

    def subscribe(self, bus: Bus, state: StepState) -> None:
        """Keep the forwards of a training loop from here on."""

        def prepared(event: ForwardPrepared) -> None:
            module = internals.unwrap_compiled(event.ddp.module)
            self.begin(module, event.args, event.kwargs, state.next_step(), checked=state.checking)

        def begins(event: ModuleForwardBegan) -> None:
            self.begin(event.module, event.args, event.kwargs, state.next_step(), checked=state.checking)

        self.guard.when_off("probe:scene", self.clear)
        bus.on("probe:scene", ForwardPrepared, prepared)
        bus.on("probe:scene", ModuleForwardBegan, begins)
        bus.on("probe:scene", ForwardEnded, lambda e: self._end(internals.unwrap_compiled(e.ddp.module), e.outputs()))
        bus.on("probe:scene", ModuleForwardEnded, lambda e: self._end(e.module, e.outputs()))
        bus.on("probe:scene", StepClosed, lambda _: self.next_step())
        bus.on("probe:scene", StepPassed, lambda _: self.next_step())

    def begin(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        step: int,
        *,
        checked: bool = True,
    ) -> None:
        """Capture a forward as it begins; only one with gradients.

        Args:
            checked: the step is, so that each module may be looked at.
        """
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self.dropped >= _MOST_FORWARDS:
            self.dropped += 1
            return
        model = self._model(module)
        model.refresh_sometimes(module, checked=checked)
        if len(self.current) + self.dropped >= _MOST_FORWARDS:
            self._drop_all()
            return
        if len(self.current) == MAX_CAPTURES:
            self.dropped += 1
            oldest = next(iter([capture for capture in self.current if not capture.suspected]))
            self._let_go(oldest)
            self.current.remove(oldest)
        kept, counted = dict[int, Kept](), Counted()
        given = (
            tuple([hold(value, kept, counted) for value in args]),
            {key: hold(value, kept, counted) for key, value in kwargs.items()},
        )
        frame = user_frame()
        capture = ForwardCapture(
            module=model.ref,
            step=step,
            given=given,
            rng=RandomState.now(),
            autocast=Autocast.now(model.device),
            names=model.names,
            read_modes=model.modes(checked=checked),
            number=len(self.current) + self.dropped,
            called_at=None if frame is None else (frame.f_code.co_filename, frame.f_lineno),
            caller=None if frame is None else (frame.f_code, frame.f_globals),
        )
        capture.kept = [value for value in kept.values() if type(value) is KeptTensor]
        self.current.append(capture)
        named = [(path, v) for path, v in leaves((args, kwargs)) if issubclass(type(v), torch.Tensor)]
        self._hold_inputs(capture, [(tensor, kept.get(id(tensor))) for _, tensor in named])
        inputs = [(path, known.version) for path, v in named if type(known := kept.get(id(v))) is KeptTensor]
        model.copy_buffers(capture, checked=checked)
        if not self._held(capture, dict([storage_of(buffer) for buffer in capture.buffers.values()])):
            capture.buffers_lost += len(capture.buffers)
            capture.buffers.clear()
        for path, read in (*inputs, *model.parameters()):
            version = read()
            if version is not None:
                capture.versions.append((path, read, version))

    def _drop_all(self) -> None:
        """Keep nothing of a step with so many forwards: of the newest alone it would not be known which one it is."""
        gone = [capture for capture in self.current if not capture.suspected]
        for capture in gone:
            self._let_go(capture)
            self.current.remove(capture)
        self.dropped += len(gone) + 1

    def end(self, module: torch.nn.Module, output: Any) -> None:
        """Capture the gradients of a forward's outputs when they come; the outputs are not held."""
        self._end(module, tensors_in(output))

    def _end(self, module: torch.nn.Module, outputs: Sequence[torch.Tensor]) -> None:
        capture = next(iter([s for s in reversed(self.current) if not s.ended and s.module() is module]), None)
        if capture is None:
            return
        capture.ended, capture.after = True, internals.next_sequence()
        self._model(module).learn()
        if not torch.is_grad_enabled():
            return
        seen: set[int] = set()
        for position, tensor in enumerate(outputs):
            if tensor.grad_fn is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            capture.partial = capture.partial or internals.is_sink(tensor.grad_fn)
            if tensor.device.type == "cpu":  # nothing is replayed on a device while the job runs
                keep = _KeepGradient(weakref.ref(self), weakref.ref(capture), position).keep
                entries_of(self.guard).on_tensor("probe:scene", tensor, keep)

    def keep_gradient(self, capture: ForwardCapture, position: int, gradient: torch.Tensor | None) -> None:
        """Hold an output's gradient if the memory bound allows it."""
        if gradient is None:  # under find_unused_parameters, of an output that the loss leaves out
            return
        address, size = storage_of(gradient)
        if is_ours_to_keep(gradient) and capture in self.current and self._held(capture, {address: size}):
            capture.gradients[position] = internals.alias(gradient)
        else:
            capture.gradients_lost += size

    def suspect(self) -> None:
        """Hold the newest forward's inputs until the end of its step, after a non-finite value has followed from it."""
        capture = self.current[-1] if self.current else None
        if capture is None or capture.suspected or any([known.suspected for known in self.current]):
            return
        capture.suspected = True
        for kept in capture.kept:
            kept.hold()

    def next_step(self) -> None:
        """Make the current step's forwards the previous ones, without their gradients."""
        if not self.current:
            return
        for capture in self.previous:
            self._let_go(capture)
        for capture in self.current:
            if capture.suspected:
                capture.suspected = False
                self._let_go(capture)
            addresses = {address for address, _ in [storage_of(gradient) for gradient in capture.gradients.values()]}
            capture.gradients.clear()
            gone = {address: size for address, size in capture.pieces.items() if address in addresses}
            self.room.give_back(gone)
            capture.pieces = {address: size for address, size in capture.pieces.items() if address not in gone}
        self.current, self.previous = self.previous, self.current
        self.current.clear()
        self.dropped = 0

    def clear(self) -> None:
        """Release all captures."""
        for capture in (*self.previous, *self.current):
            capture.suspected = False
            self._let_go(capture)
        self.current.clear()
        self.previous.clear()
        self._models.clear()

    def of_step(self, step: int) -> list[ForwardCapture]:
        """Return the kept forwards of a step, oldest first."""
        return [capture for capture in (*self.previous, *self.current) if capture.step == step]

    def newest(self, module: torch.nn.Module | None) -> ForwardCapture | None:
        """Return the newest kept forward of a module in this step."""
        return next(iter([s for s in reversed(self.current) if module is not None and s.module() is module]), None)

    def likeliest(self, module: torch.nn.Module | None) -> ForwardCapture | None:
        """Return the suspected forward of a module, or the newest one."""
        suspects = [s for s in self.current if s.suspected and module is not None and s.module() is module]
        return suspects[0] if suspects else self.newest(module)

    def _hold_inputs(self, capture: ForwardCapture, inputs: list[tuple[torch.Tensor, Kept | None]]) -> None:
        """Hold the memory of a forward's inputs if all of it fits; say of each why it may be gone later."""
        pieces: dict[int, int] = {}
        fitting: list[KeptTensor] = []
        for tensor, kept in inputs:
            if type(kept) is not KeptTensor:  # no block of memory, or inside an object
                continue
            if is_ours_to_keep(tensor):
                address, size = storage_of(tensor)
                pieces[address] = size
                fitting.append(kept)
            elif tensor.device.type != "cpu":
                kept.why = "the memory of a device is left to the job"
            else:
                kept.why = "memory that is not ordinary (of a loader's worker, of NumPy, of a file, of a subclass)"
        total, limit = sum(pieces.values()), self.room.limit
        fits = self._held(capture, pieces)
        for kept in fitting:
            if fits:
                kept.hold()
                kept.why = f"newer forwards needed the {size_text(limit)} that are kept; --keep-inputs keeps more"
            else:
                kept.why = f"{size_text(total)}, above the bound of {size_text(limit)}; --keep-inputs raises it"

    def _held(self, capture: ForwardCapture, pieces: dict[int, int]) -> bool:
        """Count memory that a forward is about to hold; older forwards make room. False when it is too much."""
        new = {address: size for address, size in pieces.items() if address not in capture.pieces}
        if sum({**capture.pieces, **new}.values()) > self.room.limit:
            return False
        self.room.take(new)
        capture.pieces |= new
        for older in (*self.previous, *self.current):
            if self.room.used <= self.room.limit:
                break
            if older is not capture:
                self._let_go(older)
        return True

    def _let_go(self, capture: ForwardCapture) -> None:
        """Hold nothing of a forward; what the job still has can be had from it."""
        if not capture.suspected:
            for kept in capture.kept:
                kept.let_go()
        capture.gradients_lost += sum(gradient.nbytes for gradient in capture.gradients.values())
        capture.buffers_lost += len(capture.buffers)
        capture.gradients.clear()
        capture.buffers.clear()
        self.room.give_back(capture.pieces)
        capture.pieces = {}

    def _model(self, module: torch.nn.Module) -> _Model:
        key = id(module)
        known = self._models.get(key)
        if known is None or known.ref() is not module:
            models = self._models
            ref = entries_of(self.guard).when_gone("probe:scene", module, lambda: _drop(models, key))
            known = self._models[key] = _Model(ref)
        return known


class _KeepGradient:
    """A tensor hook that changes nothing; it holds the capture weakly, so that a graph keeps no inputs alive."""

    __slots__ = ("_capture", "_captures", "_position")

    def __init__(
        self, captures: weakref.ref[ForwardCaptures], capture: weakref.ref[ForwardCapture], position: int
    ) -> None:
        self._captures, self._capture, self._position = captures, capture, position

    def keep(self, gradient: torch.Tensor | None) -> None:
        """Keep the gradient that has come."""
        captures, capture = self._captures(), self._capture()
        if captures is not None and capture is not None:
            captures.keep_gradient(capture, self._position, gradient)


#: Name of a buffer, name of its module, its module, its name there.
_Buffer = tuple[str, str, weakref.ref[torch.nn.Module], str]


class _Model:
    """The lists of a model's parts, made seldom, because walking a module tree takes long. Holds everything weakly."""

    def __init__(self, ref: weakref.ref[torch.nn.Module]) -> None:
        self.ref = ref
        self.device = "cpu"
        self.names: tuple[str, ...] = ()
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._parameters: list[tuple[str, Callable[[], int | None]]] = []
        self._buffers: list[_Buffer] = []
        self._copied: list[_Buffer] = []  # of these, those that forward writes
        self._written: set[str] = set()  # names of modules whose forward writes buffers
        self._before: list[tuple[_Buffer, int | None]] = []
        self._uses = 0

    def refresh_sometimes(self, module: torch.nn.Module, *, checked: bool) -> None:
        """Walk the tree anew at the first forward, and from time to time, since users change models."""
        self._uses += 1
        stale = checked and (self._uses > _REFRESH or any([ref() is None for ref in self._modules]))
        if self._modules and not stale:
            return
        self._uses = 0
        named = list(internals.named_modules(module))
        self.names = tuple([name for name, _ in named])
        self._modules = [weakref.ref(m) for _, m in named]
        parameters = list(internals.named_parameters(module))
        self.device = parameters[0][1].device.type if parameters else "cpu"
        spread = max(1, -(-len(parameters) // _MAX_VERSIONS))
        owners = {name: ref for (name, _), ref in zip(named, self._modules, strict=True)}
        self._parameters = [
            (f"parameter {name}", partial(_version, owners.get(name.rpartition(".")[0]), name.rpartition(".")[2]))
            for name, _ in parameters[::spread]
        ]
        self._buffers = [
            (f"{name}.{key}" if name else key, name, weakref.ref(m), key)
            for name, m in named
            for key in internals.own_buffers(m)
        ]
        # Batch normalisation writes its statistics without telling the version counter.
        self._written |= {name for name, m in named if "running_mean" in internals.own_buffers(m)}
        self._choose()

    def modes(self, *, checked: bool) -> Callable[[], bytes]:
        """Return what returns train/eval of every module: of a checked forward as it is now."""
        modules = self._modules  # replaced as a whole

        def read() -> bytes:
            return bytes([m is not None and internals.in_train_mode(m) for m in [ref() for ref in modules]])

        if not checked:
            return read
        found = read()
        return lambda: found

    def parameters(self) -> Sequence[tuple[str, Callable[[], int | None]]]:
        """Return what reads the versions of a bounded number of parameters: an optimizer step shows in any of them."""
        return self._parameters

    def copy_buffers(self, capture: ForwardCapture, *, checked: bool) -> None:
        """Copy the buffers that forward writes, and in a checked step note the versions of the others."""
        self._before = []
        names, buffers = [], []
        room = _BUFFER_BYTES
        copied = self._copied
        if checked:
            rest = ((row, _buffer(row[2](), row[3])) for row in self._buffers if row[1] not in self._written)
            self._before = [(row, internals.version_of(buffer)) for row, buffer in rest if buffer is not None]
        elif len(copied) > _MAX_BUFFERS:
            capture.buffers_lost += len(copied) - _MAX_BUFFERS
            copied = copied[:_MAX_BUFFERS]
        for name, _, ref, key in copied:
            if (buffer := _buffer(ref(), key)) is None:
                continue
            room -= buffer.numel() * buffer.itemsize  # a sparse one has no `nbytes`
            if room >= 0 and buffer.device.type == "cpu":
                names.append(name)
                buffers.append(buffer)
            else:
                capture.buffers_lost += 1
        capture.buffers = dict(zip(names, internals.clones(buffers), strict=True))

    def learn(self) -> None:
        """Find out which modules' forward has written buffers."""
        for (_, owner, ref, key), before in self._before:
            if before is not None:
                buffer = _buffer(ref(), key)
                if buffer is not None and internals.version_of(buffer) != before:
                    self._written.add(owner)
        if self._before:
            self._choose()

    def _choose(self) -> None:
        self._copied = [row for row in self._buffers if row[1] in self._written]


def _drop(models: dict[int, _Model], key: int) -> None:
    models.pop(key, None)


def _version(owner: weakref.ref[torch.nn.Module] | None, key: str) -> int | None:
    module = None if owner is None else owner()
    parameter = None if module is None else internals.parameters_of(module).get(key)
    return None if parameter is None else internals.version_of(parameter)


def _buffer(module: torch.nn.Module | None, key: str) -> torch.Tensor | None:
    return None if module is None else internals.buffers_of(module).get(key)
