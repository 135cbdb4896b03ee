"""What is kept of the newest training forwards so that they can be run once more. Never waits for a device.

Inputs and output gradients are kept by reference, together with their version counters, so that a later in-place change
is known. Outputs and graphs are never held. Small things are copied: random state, and the buffers that forward writes.
"""

from __future__ import annotations

import importlib
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.guard import Guard, location, user_frame
from ddpdebug.probes.values import tensors_in

#: Micro-batches of one step that are kept.
MAX_SCENES = 8
_BUFFER_BYTES = 1 << 20
_GRADIENT_BYTES = 64 << 20
#: An input that carries a graph is an activation of another model: it is kept without the graph, and only when small.
_ACTIVATION_BYTES = 64 << 20
_MAX_VERSIONS = 16
_REFRESH = 100
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Stands for a value that was not kept."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The state of the generators that a forward may draw from; None for those that were not kept."""

    cpu: torch.Tensor | None = None
    cuda: torch.Tensor | None = None
    device: int = 0
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls) -> RandomState:
        """Copy the states; draws nothing."""
        numpy = sys.modules.get("numpy.random")
        cuda, device = None, 0
        if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            device = torch.cuda.current_device()
            cuda = torch.cuda.get_rng_state(device)
        return cls(
            cpu=torch.default_generator.get_state(),
            cuda=cuda,
            device=device,
            python=random.getstate(),
            numpy=None if numpy is None else numpy.get_state(),
        )

    def restore(self) -> None:
        """Put the kept states back."""
        if self.cpu is not None:
            torch.default_generator.set_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda, self.device)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            importlib.import_module("numpy.random").set_state(self.numpy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """Whether autocast was on around the forward, and to which type it casts."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        """Read the state for a kind of device."""
        enabled = torch.is_autocast_enabled(device)
        return cls(device=device, enabled=enabled, dtype=torch.get_autocast_dtype(device))


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Scene:
    """One training forward. `module` gives the module while it lives."""

    module: Callable[[], torch.nn.Module | None]
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: RandomState
    autocast: Autocast
    names: tuple[str, ...] = ()  # of the modules, in the order of `modes`
    modes: bytes = b""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # copies, of those that forward writes
    buffers_lost: int = 0  # buffers that forward writes and that were too large to copy
    versions: list[tuple[str, weakref.ref[torch.Tensor], int]] = field(default_factory=list)
    called_at: tuple[str, int] | None = None  # file and line of the call
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # by the output's position
    gradients_lost: int = 0  # bytes
    room: list[int] = field(default_factory=lambda: [0])  # bytes for gradients, shared by the forwards of a step
    partial: bool = False  # an output's gradient lacks what flows through the other outputs
    after: int = 0  # the number of the first autograd node that was made after the forward
    ended: bool = False

    @property
    def location(self) -> str | None:
        """Return `file:line` of the call."""
        return None if self.called_at is None else location(*self.called_at)

    def changed(self) -> list[str]:
        """Return the names of inputs and parameters that were written in place since the forward."""
        found = []
        for name, ref, version in self.versions:
            tensor = ref()
            if tensor is not None and internals.version_of(tensor) != version:
                found.append(name)
        return found

    def lost(self) -> list[str]:
        """Return what of the arguments was not kept."""
        return [f"{path}: {value.what}" for path, value in leaves((self.args, self.kwargs)) if isinstance(value, Lost)]

    def keep_gradient(self, position: int, gradient: torch.Tensor | None) -> None:
        """Keep an output's gradient by reference while the bound allows it."""
        if gradient is None:  # under find_unused_parameters, of an output that the loss leaves out
            return
        size = gradient.untyped_storage().nbytes()
        if size > self.room[0]:
            self.gradients_lost += size
        else:
            self.room[0] -= size
            self.gradients[position] = gradient


class Scenes:
    """Keeps the forwards of the current step, and of the step before it."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.current: deque[Scene] = deque(maxlen=MAX_SCENES)
        self.previous: deque[Scene] = deque(maxlen=MAX_SCENES)
        self.dropped = 0  # micro-batches of the current step that are no longer kept
        self._models: dict[int, _Model] = {}
        self._room = [_GRADIENT_BYTES]

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> None:
        """Note the beginning of a forward; only of one with gradients."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        model = self._model(module)
        model.refresh_sometimes(module)
        if len(self.current) == MAX_SCENES:
            self.dropped += 1
        scene = Scene(
            module=model.ref,
            step=step,
            args=hold(args),
            kwargs=hold(kwargs),
            rng=RandomState.now(),
            autocast=Autocast.now(model.device),
            names=model.names,
            modes=model.modes(),
            room=self._room,
            called_at=None if (frame := user_frame()) is None else (frame.f_code.co_filename, frame.f_lineno),
        )
        model.copy_buffers(scene)
        named = [(path, v) for path, v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        for path, tensor in (*named, *model.parameters()):
            version = internals.version_of(tensor)
            if version is not None:
                scene.versions.append((path, weakref.ref(tensor), version))
        self.current.append(scene)

    def end(self, module: torch.nn.Module, output: Any) -> None:
        """Ask for the gradients of a forward's outputs, which are not held themselves."""
        scene = next((s for s in reversed(self.current) if not s.ended and s.module() is module), None)
        if scene is None:
            return
        scene.ended, scene.after = True, internals.next_sequence()
        self._model(module).learn()
        if not torch.is_grad_enabled():
            return
        seen: set[int] = set()
        for position, tensor in enumerate(tensors_in(output)):
            if tensor.grad_fn is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            scene.partial = scene.partial or internals.is_sink(tensor.grad_fn)
            keep = _KeepGradient(weakref.ref(scene), position).keep
            entries_of(self._guard).on_tensor("probe:scene", tensor, keep)

    def next_step(self) -> None:
        """Make the current step's forwards the previous ones, without their gradients."""
        if not self.current:
            return
        for scene in self.current:
            scene.gradients.clear()
        self.current, self.previous = self.previous, self.current
        self.current.clear()
        self.dropped, self._room = 0, [_GRADIENT_BYTES]

    def clear(self) -> None:
        """Let go of everything."""
        self.current.clear()
        self.previous.clear()
        self._models.clear()

    def of_step(self, step: int) -> list[Scene]:
        """Return the kept forwards of a step, oldest first."""
        return [scene for scene in (*self.previous, *self.current) if scene.step == step]

    def _model(self, module: torch.nn.Module) -> _Model:
        key = id(module)
        known = self._models.get(key)
        if known is None or known.ref() is not module:
            models = self._models
            ref = entries_of(self._guard).when_gone("probe:scene", module, lambda: _drop(models, key))
            known = self._models[key] = _Model(ref)
        return known


class _KeepGradient:
    """A tensor hook that changes nothing; it holds the scene weakly, so that a graph keeps no inputs alive."""

    __slots__ = ("_position", "_scene")

    def __init__(self, scene: weakref.ref[Scene], position: int) -> None:
        self._scene, self._position = scene, position

    def keep(self, gradient: torch.Tensor | None) -> None:
        """Keep the gradient that has come."""
        scene = self._scene()
        if scene is not None:
            scene.keep_gradient(self._position, gradient)


class _Model:
    """The lists of a model's parts, made seldom, because walking a module tree takes long. Holds everything weakly."""

    def __init__(self, ref: weakref.ref[torch.nn.Module]) -> None:
        self.ref = ref
        self.device = "cpu"
        self.names: tuple[str, ...] = ()
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._parameters: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._buffers: list[tuple[str, str, weakref.ref[torch.nn.Module], str]] = []
        self._written: set[str] = set()  # names of modules whose forward writes buffers
        self._before: list[int | None] = []
        self._uses = 0

    def refresh_sometimes(self, module: torch.nn.Module) -> None:
        """Walk the tree anew at the first forward, and from time to time, since users change models."""
        if self._uses % _REFRESH and all(ref() is not None for ref in self._modules):
            self._uses += 1
            return
        self._uses += 1
        named = list(module.named_modules())
        self.names = tuple(name for name, _ in named)
        self._modules = [weakref.ref(m) for _, m in named]
        parameters = list(module.named_parameters())
        self.device = parameters[0][1].device.type if parameters else "cpu"
        spread = max(1, -(-len(parameters) // _MAX_VERSIONS))
        self._parameters = [(f"parameter {name}", weakref.ref(p)) for name, p in parameters[::spread]]
        self._buffers = [
            (f"{name}.{key}" if name else key, name, weakref.ref(m), key)
            for name, m in named
            for key in internals.own_buffers(m)
        ]
        # Batch normalisation writes its statistics without telling the version counter.
        self._written |= {name for name, m in named if getattr(m, "running_mean", None) is not None}

    def modes(self) -> bytes:
        """Return train/eval of every module."""
        found = [ref() for ref in self._modules]
        return bytes([m is not None and m.training for m in found])

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return a bounded number of parameters: an optimizer step shows in any of them."""
        return ((name, p) for name, ref in self._parameters if (p := ref()) is not None)

    def copy_buffers(self, scene: Scene) -> None:
        """Copy the buffers that forward writes, and note the versions of the others."""
        self._before = []
        names, buffers = [], []
        room = _BUFFER_BYTES
        for name, owner, ref, key in self._buffers:
            buffer = _buffer(ref(), key)
            if buffer is None or owner not in self._written:
                self._before.append(None if buffer is None else internals.version_of(buffer))
                continue
            self._before.append(None)
            room -= buffer.nbytes
            if room >= 0:
                names.append(name)
                buffers.append(buffer)
            else:
                scene.buffers_lost += 1
        scene.buffers = dict(zip(names, internals.clones(buffers), strict=True))

    def learn(self) -> None:
        """Find out which modules' forward has written buffers."""
        for (_, owner, ref, key), before in zip(self._buffers, self._before, strict=False):
            if before is not None:
                buffer = _buffer(ref(), key)
                if buffer is not None and internals.version_of(buffer) != before:
                    self._written.add(owner)


def _drop(models: dict[int, _Model], key: int) -> None:
    models.pop(key, None)


def _buffer(module: torch.nn.Module | None, key: str) -> torch.Tensor | None:
    return None if module is None else internals.buffers_of(module).get(key)


def hold(value: Any, depth: int = 0) -> Any:
    """Return the value with its own containers but the same tensors, without their graphs."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is None:
            return value
        if value.untyped_storage().nbytes() > _ACTIVATION_BYTES:
            return Lost(what=f"an activation of {value.nbytes} bytes")
        return value.detach().requires_grad_(value.requires_grad)
    if depth < _MAX_DEPTH and is_container(value):
        return rebuilt(value, [hold(item, depth + 1) for _, item in items(value)])
    if any(tensor.grad_fn is not None for tensor in tensors_in(value)):
        return Lost(what=f"a {type(value).__name__} with tensors that carry a graph")
    return value


def is_container(value: Any) -> bool:
    """Tell whether a value is a plain container, which can be made anew from its items."""
    kind = type(value)
    return kind in {dict, list, tuple} or (isinstance(value, tuple) and hasattr(kind, "_make"))


def items(value: Any) -> list[tuple[Any, Any]]:
    """Return keys and items of a container."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def rebuilt(value: Any, values: list[Any]) -> Any:
    """Return a container like `value` with other items."""
    if isinstance(value, dict):
        return dict(zip(value, values, strict=True))
    make = getattr(type(value), "_make", type(value))
    return make(values)


def leaves(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of everything in args and kwargs that is no container: `args[0]["mask"]`, `x[1]`."""
    args, kwargs = arguments
    for i, value in enumerate(args):
        yield from _leaves(f"args[{i}]", value, 0)
    for key, value in kwargs.items():
        yield from _leaves(str(key), value, 0)


def _leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if depth < _MAX_DEPTH and is_container(value):
        for key, item in items(value):
            yield from _leaves(f"{path}[{key!r}]", item, depth + 1)
        return
    yield path, value
    if hasattr(type(value), "__dataclass_fields__") and depth < _MAX_DEPTH:
        for key, item in getattr(value, "__dict__", {}).items():
            yield from _leaves(f"{path}.{key}", item, depth + 1)
