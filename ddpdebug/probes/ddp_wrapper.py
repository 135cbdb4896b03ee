"""The state of each DistributedDataParallel: its settings when it was made, and its use by the code since."""

from __future__ import annotations

import weakref
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.foreign import bases_of
from ddpdebug.isolation.user_code import location, user_frame, user_location
from ddpdebug.probes.constants import Settings
from ddpdebug.probes.entries import Entries
from ddpdebug.schema.announcements import Announce, InitialValues, Structure
from ddpdebug.schema.details import Bypass, UnsyncedBackward, hex_digest
from ddpdebug.schema.row import CHECKSUM_SLOTS

#: Of the gradients of a larger model each checked step sums those in `SLOTS_PER_STEP` of the slots, in turn.
LARGE_BYTES = 4 << 20
SLOTS_PER_STEP = 2


def slot_of(name: str) -> int:
    """Return the checksum slot of a parameter, by its name in its DDP."""
    return fingerprint.of_text(name) % CHECKSUM_SLOTS


class Wrapper:
    """One DDP: its parameters as they were at wrapping, and the state of the current micro-batch.

    Holds the DDP weakly: watching a model must not keep it alive.
    """

    def __init__(self, ddp: DistributedDataParallel, index: int, entries: Entries) -> None:
        self.index, self._entries = index, entries
        me = weakref.ref(self)  # a wrapper must not live for as long as its DDP
        self.ref = entries.when_gone("probe:wrapper", ddp, lambda: None if (w := me()) is None else w.forget())
        self.group = internals.group_ranks(ddp)
        self.ignored = internals.ignored_names(ddp.module)
        module = internals.unwrap_compiled(ddp.module)
        named = [(n, p) for n, p in internals.named_parameters(module) if n not in self.ignored]
        #: id -> name, of everything that the reducer was given the chance to own
        self.wrapped: dict[int, str] = {id(p): n for n, p in named}
        self.trainable = {id(p) for _, p in named if p.requires_grad}
        self._accumulators = {id(p): internals.accumulator(p) for _, p in named if p.requires_grad}
        self.wrapped_names = {n for n, _ in named}
        self.slots = {id(p): slot_of(n) for n, p in named}
        self.is_large = sum(p.nbytes for _, p in named if p.requires_grad) > LARGE_BYTES
        self.hook: str | None = None
        self.hook_kind: str | None = None  # None, "known", "half", "lossy", "local", "custom"
        self.settings = Settings(module)
        # the current micro-batch
        self.forwards = 0
        self.armed = False
        self.in_place = True  # a gradient may be reduced before the backward has ended
        self.forward_in_no_sync = False
        self.forward_location: str | None = None
        self.arrived = False
        self.in_forward = False
        self.elsewhere = False  # another thread than the followed one trains it
        self._join: object | None = None
        self.unpaired = False  # ranks leave a Join with different counts: their later steps do not pair by number
        # since the last synchronised backward
        self.pending: dict[str, Any] | None = None
        self.call_site: CallSite | None = None  # looked for once the wrapper has been bypassed

    @property
    def prefix(self) -> str:
        """The prefix of its parameters' names if there are several models."""
        return f"ddp{self.index}"

    def forget(self) -> None:
        """Drop references that would outlive the model: the nodes hold its parameters."""
        self._accumulators.clear()

    def cut(self) -> None:
        """Reset the state of the micro-batch after an exception has interrupted it."""
        self.forwards, self.armed, self.arrived, self.in_forward = 0, False, False, False
        self.pending = None

    def module(self) -> torch.nn.Module | None:
        """Return the wrapped module; None if it does not live any more."""
        ddp = self.ref()
        return None if ddp is None else internals.unwrap_compiled(ddp.module)

    def sums(self, key: int, step: int) -> bool:
        """Return whether a parameter's gradient is summed in a step: by name and step, so alike on all ranks."""
        if not self.is_large:
            return True
        return self.slots[key] // SLOTS_PER_STEP == step % (CHECKSUM_SLOTS // SLOTS_PER_STEP)

    def begin_forward(self, ddp: DistributedDataParallel, *, in_no_sync: bool, location: str | None) -> None:
        """Record a forward with gradients: DDP decides here whether the coming backward is reduced."""
        self.forwards += 1
        session = internals.join_session(ddp)
        self.unpaired = self.unpaired or (self._join is not None and session is not self._join)
        self._join = session
        self.armed = self.armed or internals.reduces_next(ddp)
        self.in_place = internals.reduces_in_place(ddp)
        if not self.armed:
            self.forward_in_no_sync, self.forward_location = in_no_sync, location

    def end_backward(self, location: str | None) -> bool:
        """Record the end of a backward in which gradients arrived; return whether DDP reduced them."""
        ddp = self.ref()
        flag_now = ddp is not None and internals.reduces_next(ddp)
        # A forward may run any number of backwards inside (a trainer that wraps its whole training step).
        synced = (self.armed and self.forwards > 0) or (self.in_forward and flag_now)
        if synced:
            self.pending = None
        elif self.forwards == 0 and not self.in_forward:
            self.pending = {"bypass": Bypass(location=location)}
            if self.call_site is None and ddp is not None:
                inner = internals.unwrap_compiled(ddp.module)
                self.call_site = CallSite(
                    self, inner, self._entries, parts=inner is ddp.module
                )  # a hook inside would recompile
        else:
            kind = "last-micro-batch"
            if flag_now:
                kind = "forward-only" if self.forward_in_no_sync else "flag-after-forward"
            self.pending = {"no_sync": UnsyncedBackward(kind=kind, location=self.forward_location or location)}
        self.forwards, self.armed, self.arrived = 0, False, False
        return synced

    def unreduced(self, name: str, parameter: torch.Tensor) -> str | None:
        """Return why the reducer does not own a parameter that the optimizer steps; None if it does."""
        key = id(parameter)
        if key not in self.wrapped:
            return "replaced" if name in self.wrapped_names else "added"
        if key not in self.trainable:
            return "unfrozen" if parameter.requires_grad else None
        known = self._accumulators.get(key)  # gone with the model
        if known is None or not parameter.requires_grad:  # frozen for a while, as GANs do: looked at once it trains
            return None
        return "retyped" if internals.accumulator(parameter) is not known else None


class CallSite:
    """Finds the line that calls the inner module directly, by forward pre-hooks that are removed after the first call.

    On all of its modules, for a loss that is a method of the model calls parts of it and never the model itself.
    Installed on suspicion only.
    """

    def __init__(self, wrapper: Wrapper, module: torch.nn.Module, entries: Entries, *, parts: bool = True) -> None:
        self.location: str | None = None
        self._wrapper = weakref.ref(wrapper)
        modules = list(internals.modules(module)) if parts else [module]
        self._methods = _code_of_methods(modules)
        self._handles: list[Any] = []
        for m in modules:
            self._handles.append(entries.before_module("probe:call-site", m, self._look))

    def _look(self, module: torch.nn.Module, args: Any) -> None:
        """Look at who calls."""
        wrapper = self._wrapper()
        if self._handles and (wrapper is None or not (wrapper.in_forward or not torch.is_grad_enabled())):
            self.location = self._caller() or user_location()
            self.remove()

    def _caller(self) -> str | None:
        """Return the nearest user's line that is in no method of the model."""
        frame = user_frame()
        while frame is not None and frame.f_code in self._methods:
            frame = user_frame(frame.f_back) if frame.f_back is not None else None
        return None if frame is None else location(frame.f_code.co_filename, frame.f_lineno)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _code_of_methods(modules: list[torch.nn.Module]) -> set[CodeType]:
    """Return the code of the modules' methods, of what wraps them, and of functions that are written inside them."""
    found: set[CodeType] = set()
    waiting: list[object] = []
    for kind in {id(base): base for module in modules for base in bases_of(type(module))}.values():
        waiting += [value for value in vars(kind).values() if not kind.__module__.startswith("torch.")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, CodeType):
            if value not in found:
                found.add(value)
                waiting += value.co_consts
        elif isinstance(value, staticmethod | classmethod):
            waiting.append(value.__func__)
        elif isinstance(value, property):
            waiting += [value.fget, value.fset]
        elif isinstance(value, FunctionType):
            waiting += [value.__code__, value.__dict__.get("__wrapped__")]
    return found


def structure(module: torch.nn.Module) -> list[list[Any]]:
    """List kind, name, shape, dtype and requires_grad of parameters and buffers, in registration order."""
    ignored = internals.ignored_names(module)
    entries: list[list[Any]] = []
    for name, p in internals.named_parameters(module):
        if name not in ignored:
            entries.append(["parameter", name, list(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad])
    for name, b in internals.named_buffers(module):
        if name not in ignored:
            entries.append(["buffer", name, list(b.shape), str(b.dtype).removeprefix("torch."), False])
    return entries


def announce_model(module: torch.nn.Module, index: int, group: list[int], announce: Announce) -> None:
    """Announce a module's structure and initial values, before DDP checks and broadcasts them."""
    inner = internals.unwrap_compiled(module)
    if any([is_lazy(tensor) for tensor in (*internals.parameters(inner), *internals.buffers(inner))]):
        return  # it has no shapes yet, and DDP refuses it
    ignored = internals.ignored_names(inner)
    entries = structure(inner)
    digest = f"{fingerprint.of_text(repr(entries)):016x}"
    told = tuple([(kind, name, tuple(shape), dtype, trained) for kind, name, shape, dtype, trained in entries])
    announce(Structure(digest=digest, entries=told, group=tuple(group)), index)
    named = [
        (n, t) for n, t in (*internals.named_parameters(inner), *internals.named_buffers(inner)) if n not in ignored
    ]
    named = [(n, t) for n, t in named if t.device.type == "cpu"]
    values = fingerprint.fingerprints([t for _, t in named])
    announce(InitialValues(digests={n: hex_digest(v) for (n, _), v in zip(named, values, strict=True)}), index)


HALF_HOOKS = {"fp16_compress_hook", "bf16_compress_hook", "fp16_compress_wrapper", "bf16_compress_wrapper"}
LOSSY_HOOKS = {"powerSGD_hook", "batched_powerSGD_hook", "quantization_pertensor_hook", "quantization_perchannel_hook"}


def classify_hook(state: object, hook: Any) -> tuple[str, str]:
    """Return (dotted name, kind) of a comm hook; kind is `custom` unless torch ships the hook."""
    name = getattr(hook, "__qualname__", type(hook).__name__)
    module = str(getattr(hook, "__module__", ""))
    shipped = module.startswith("torch.distributed.algorithms")
    last = name.rsplit(".", 1)[-1]
    kind = "custom"
    if internals.is_local_sgd_state(state) or (shipped and last == "post_localSGD_hook"):
        kind = "local"
    elif shipped and (last in LOSSY_HOOKS or "quantization" in module or "powerSGD" in module):
        kind = "lossy"
    elif shipped and (last in HALF_HOOKS or "compress_wrapper" in name):
        kind = "half"
    elif shipped and last == "allreduce_hook":
        kind = "known"
    return f"{module}.{name}", kind
