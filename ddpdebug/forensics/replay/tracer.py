"""Traces non-finite values through the operations of one forward and backward, from their origin on.

Every operation's outputs are checked. A non-finite output of finite operands begins an *origin*; operations pass it on
to what they make, and end it where the output is finite again. Infinities that the user wrote down (a mask filled with
-inf) are origins too, but not to blame unless an operation makes NaN of them: then that operation is an origin. Memory
that has not been written yet is nobody's fault either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.forensics.replay.ranges import described, is_floating, nonfinite
from ddpdebug.forensics.replay.stack_lines import user_stack
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import tensors_in
from ddpdebug.torch_internals import graph

_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"}
_CONSTANTS = {"lift", "lift_fresh", "lift_fresh_copy"}  # what `torch.tensor(...)` makes in a forward
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}
_MAX_OPERANDS = 6


class Stopped(BaseException):  # a user's `except Exception` in forward must not swallow it
    """Ends a replay from the inside; the text is the reason."""


@dataclass(slots=True)
class Origin:
    """The origin of non-finite values: an operation, a parameter, an input."""

    index: int  # of the operation; -1 for what was there before
    kind: str  # "op", "literal", "input", "parameter", "buffer", "output-gradient", "tensor", ...
    name: str  # of the operation, or of the tensor
    phase: str  # "forward" or "backward"
    value: str  # "nan" or "inf"
    module: str | None = None
    module_class: str | None = None
    call: int = 0  # which call of that module
    node: str | None = None  # the autograd node, in backward
    forward_op: str | None = None  # whose backward this is
    stack: list[str] = field(default_factory=list)
    operands: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    made_of: Origin | None = None  # the infinities that it made NaN of
    became_nan: str | None = None  # the operation that made NaN of its infinities
    ended_at: str | None = None  # an operation that has them as input and a finite output

    @property
    def intended(self) -> bool:
        """Whether the values are intended infinities: literals, or a mask in a buffer or an input."""
        return self.value == "inf" and self.kind in {"literal", "buffer", "input", "tensor"}

    @property
    def is_operation(self) -> bool:
        """Whether an operation of the replay made the values; otherwise they existed before."""
        return self.kind in {"op", "literal", "uninitialised"}

    @property
    def is_builtin(self) -> bool:
        """Whether the autograd node is one of torch's own, not that of a `torch.autograd.Function`."""
        return self.node is not None and self.node[-1:].isdecimal()

    @property
    def weak(self) -> bool:
        """Whether the evidence is weak: uninitialised memory, or a path that cannot be traced."""
        return self.kind in {"uninitialised", "unknown"}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        names = ("kind", "name", "phase", "value", "module", "module_class", "call", "node", "forward_op", "stack")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        found |= {"operands": self.operands, "result": self.result}
        found |= {"became_nan": self.became_nan, "ended_at": self.ended_at}
        made_of = self.made_of
        found["made_of"] = None if made_of is None else {**made_of.to_json(), "made_of": None}
        return found


@dataclass(frozen=True, slots=True)
class _Made:
    """The forward operation behind an autograd node."""

    op: str
    stack: list[str]
    module: tuple[str | None, str | None, int]


class Tracer(internals.OperationMode):
    """The dispatch mode under which a replay runs.

    Args:
        where: returns (path, class, call) of the module whose forward is running.
        deadline: on the clock of `time.monotonic`.
    """

    def __init__(self, where: Callable[[], tuple[str | None, str | None, int]], deadline: float) -> None:
        super().__init__()
        self.origins: list[Origin] = []
        self.operations = 0
        self.stopped: str | None = None
        self.muted = False  # what runs now is not the model's
        self._where, self._deadline = where, deadline
        self._at: dict[int, Origin] = {}  # by address of the storage
        self._ours: set[int] = set()  # addresses of memory that the replay made
        self._nodes: dict[int, _Made] = {}
        self._last_sequence = internals.next_sequence()

    def add_source(self, tensor: torch.Tensor, kind: str, name: str, *, phase: str = "forward") -> Origin | None:
        """Record a tensor that was non-finite before the replay; return its origin, None if it is finite."""
        value = nonfinite(tensor) if is_floating(tensor) else None
        if value is None:
            return None
        origin = Origin(-1, kind, name, phase, value, result=described(tensor))
        self.origins.append(origin)
        self._at[_address(tensor)] = origin
        return origin

    def origin_of(self, tensor: torch.Tensor) -> Origin | None:
        """Return the origin of a tensor's non-finite values; None if there is none."""
        return self._at.get(_address(tensor))

    def stop(self, reason: str) -> None:
        """End the replay with a reason."""
        self.stopped = reason
        raise Stopped(reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.muted:
            return func(*args, **kwargs)
        if func.namespace in internals.COLLECTIVES:
            self.stop(f"it communicates ({func}), which one rank cannot do alone")
        if time.monotonic() > self._deadline:
            self.stop(f"out of time after {self.operations} operations")
        self.operations += 1
        schema = internals.schema(func)
        call = _Call(str(func), schema.name.rpartition("::")[2], internals.current_node(), args, kwargs)
        call.take_operands(schema)
        self._note_node(call)
        output = func(*args, **kwargs)
        self._follow(call, list(tensors_in(output)))
        return output

    def _note_node(self, call: _Call) -> None:
        """Remember which line made the autograd node that this operation belongs to."""
        sequence = internals.next_sequence()
        if sequence > self._last_sequence:
            made = _Made(call.name, user_stack(), self._where())
            for number in range(self._last_sequence, sequence):
                self._nodes[number] = made
            self._last_sequence = sequence

    def _follow(self, call: _Call, outputs: Sequence[torch.Tensor]) -> None:
        new = {_address(t) for t in outputs} - call.addresses
        self._ours |= new
        floating = [t for t in outputs if is_floating(t)]
        found = {id(t): state for t in floating if (state := nonfinite(t))}
        bad = [t for t in floating if id(t) in found]
        reached = [self._at[a] for t in call.operands if (a := _address(t)) in self._at]
        if floating and not bad and reached and any(call.states()):
            for origin in reached:
                origin.ended_at = origin.ended_at or call.name
        for address in new | {_address(t) for t in call.overwritten}:
            self._at.pop(address, None)
        if not bad:
            return
        value = "nan" if "nan" in found.values() else "inf"
        origin = self._origin(call, value, bad[0])
        for tensor in bad:
            self._at[_address(tensor)] = origin

    def _origin(self, call: _Call, value: str, result: torch.Tensor) -> Origin:
        """Return where an operation's non-finite output comes from: itself, or one of its operands' origins."""
        if call.base in _UNWRITTEN:
            return self._begin(call, value, result, "uninitialised")
        if call.base in _CONSTANTS:
            return self._begin(call, value, result, "literal")
        source = self._source(call)
        if source is None:
            return self._begin(call, value, result, "literal" if _is_literal(call.args, call.kwargs) else "op")
        if value == "nan" and "nan" not in call.states():
            if source.intended:
                origin = self._begin(call, value, result, "op")
                origin.made_of = source
                return origin
            if source.became_nan is None:
                source.became_nan = " at ".join([call.name, *user_stack()[:1]])
        return source

    def _source(self, call: _Call) -> Origin | None:
        """Return where the operands' non-finite values came from: what is to blame before what was intended."""
        origins = []
        for tensor, state in zip(call.operands, call.states(), strict=True):
            if state is None:
                continue
            known = self._at.get(_address(tensor))
            if known is None:
                outside = _address(tensor) not in self._ours
                name = "a tensor that is no parameter, buffer or input" if outside else ""
                phase = "forward" if call.node is None else "backward"
                known = Origin(-1, "tensor" if outside else "unknown", name, phase, state, result=described(tensor))
                self.origins.append(known)
                self._at[_address(tensor)] = known
            origins.append(known)
        return min(origins, key=lambda o: (o.intended, o.weak, o.index), default=None)

    def _begin(self, call: _Call, value: str, result: torch.Tensor, kind: str) -> Origin:
        path, module_class, number = self._where()
        phase = "forward" if call.node is None else "backward"
        origin = Origin(self.operations, kind, call.name, phase, value, path, module_class, number)
        origin.stack = user_stack()
        origin.operands, origin.result = call.described(), described(result)
        if call.node is not None:
            origin.node = graph.name_of(call.node)
            made = self._nodes.get(internals.sequence_of(call.node))
            if made is not None:
                origin.forward_op = made.op
                origin.stack = origin.stack or made.stack
                if path is None:
                    origin.module, origin.module_class, origin.call = made.module
        self.origins.append(origin)
        return origin


class _Call:
    """One operation with its operands, as they were before it ran."""

    def __init__(self, name: str, base: str, node: Any, args: Any, kwargs: Any) -> None:
        self.name, self.base, self.node, self.args, self.kwargs = name, base, node, args, kwargs
        everything = self.tensors = list(tensors_in((args, kwargs)))
        self.addresses = {_address(t) for t in everything}
        self.overwritten: list[torch.Tensor] = []  # written without being read
        self.operands = [t for t in everything if is_floating(t)]
        self._states: list[str | None] | None = None
        self._described: list[dict[str, Any]] | None = None

    def take_operands(self, schema: Any) -> None:
        """Find out what the operation writes, and look at what it reads while it is still there."""
        if not schema.is_mutable:
            return
        written: list[torch.Tensor] = []
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = self.args[position] if position < len(self.args) else self.kwargs.get(argument.name)
            tensors = list(tensors_in(value))
            written += tensors
            if argument.is_out or self.base in _OVERWRITING:
                self.overwritten += tensors
        unread = {id(t) for t in self.overwritten}
        self.operands = [t for t in self.operands if id(t) not in unread]
        if any(t is w for t in self.operands for w in written):
            self._states = [nonfinite(t) for t in self.operands]
            self._described = [described(t) for t in self.operands[:_MAX_OPERANDS]]

    def states(self) -> list[str | None]:
        """Return "nan", "inf" or None for each operand."""
        if self._states is None:
            self._states = [nonfinite(t) for t in self.operands]
        return self._states

    def described(self) -> list[dict[str, Any]]:
        """Return what the first operands contained, and the plain numbers among the arguments."""
        found = self._described or [described(t) for t in self.operands[:_MAX_OPERANDS]]
        numbers = [v for v in (*self.args, *self.kwargs.values()) if type(v) in {int, float}]
        return found + [{"value": v if math.isfinite(v) else str(v)} for v in numbers[:_MAX_OPERANDS]]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError) as error:  # sparse, or a wrapper without memory of its own
        if is_users(error):
            raise
        return -id(tensor)


def _is_literal(args: Any, kwargs: Any) -> bool:
    """Whether an operation was given a number that is not finite: the user wrote it down."""
    values = [*args, *kwargs.values()]
    return any(isinstance(v, float) and not math.isfinite(v) for v in values)
