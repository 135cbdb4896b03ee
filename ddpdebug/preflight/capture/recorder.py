"""Recording of a running script's losses as tapes: one for each backward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddpdebug.errors import text_of
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.process_state import Autocast
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import copy_of, mapped, tensors_in_objects
from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.capture.tape import Constant, Made, Node, Tape, Weight, needed_for

_WRITERS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"})
Operand = Made | Weight | Constant
#: The part of the preflight that writes down what follows from a model.
RECORDING = "preflight:recording"


class Root:
    """A model of the script, and its copy from before the first step."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.copy = copied(module)
        self.paths = {id(part): name for name, part in module.named_modules()}
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.tensors = [*module.named_parameters(), *module.named_buffers()]


@dataclass(slots=True)
class _Call:
    """A call that has begun: `finish` is given its result; what it calls is not written down where it is `inside`."""

    owner: tuple[int, int]  # the thread, and the identity of the first argument
    inside: bool
    finish: Callable[[Any], None] | None = None


class Recorder(TorchFunctionMode):
    """A function mode that records the torch calls from a model's forward to the backward of its loss.

    Where recording fails, the tape is spoiled and `trouble` says why; nothing of it reaches the script.

    Args:
        guard: what its looks run under.
    """

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard
        self.roots: list[Root] = []
        self.trouble: str | None = None
        self.done = False
        self.last: Any = None  # what a model returned last
        self._known: dict[int, tuple[Tensor, Operand]] = {}
        self._calls: list[_Call] = []  # that have begun, the innermost last
        self._own = False  # what runs is ours
        self._clear()

    def _clear(self) -> None:
        self._nodes: list[Node] = []
        self._constants: list[Tensor] = []
        self._armed = False
        self._known.clear()
        for number, root in enumerate(self.roots):
            for name, tensor in root.tensors:
                self._known[id(tensor)] = (tensor, Weight(number, name))

    def add(self, root: Root) -> None:
        """Record the calls of a further model from now on."""
        self.roots.append(root)
        for name, tensor in root.tensors:
            self._known[id(tensor)] = (tensor, Weight(len(self.roots) - 1, name))

    # --- what the script does ---

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.done or self.busy or not self._armed:
            return func(*args, **kwargs)
        finish = self.guard.run(RECORDING, self.function, func, args, kwargs)
        result = func(*args, **kwargs)
        if finish is not None:
            self.guard.run(RECORDING, finish, result)
        return result

    @property
    def busy(self) -> bool:
        """Whether the running code is ddpdebug's own, or inside a call that is recorded as a whole."""
        return self._own or any(call.inside for call in self._calls)

    def begins(self, owner: Any, *, inside: bool = False, finish: Callable[[Any], None] | None = None) -> None:
        """Note that a call begins; `ends` or `fails` is called for it with the same first argument."""
        self._calls.append(_Call((threading.get_ident(), id(owner)), inside, finish))

    def ends(self, owner: Any, result: Any) -> None:
        """Finish a call with its result."""
        call = self.fails(owner)
        if call is not None and call.finish is not None:
            call.finish(result)

    def fails(self, owner: Any) -> _Call | None:
        """Remove a call that has raised, and the unfinished calls inside it."""
        wanted = threading.get_ident(), id(owner)
        place = next((i for i in reversed(range(len(self._calls))) if self._calls[i].owner == wanted), None)
        if place is None:
            return None
        call = self._calls[place]
        del self._calls[place:]
        return call

    def cut(self) -> None:
        """Discard unfinished records after an exception in the user's code."""
        for call in self._calls:
            call.finish = None
        self._own = False
        self._clear()

    def function(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        """Return the callback that records a function call's result; None if no argument derives from the model."""
        if self.busy or not self._armed or not any(self._follows(t) for t in tensors_in_objects((args, kwargs))):
            return None
        name = str(getattr(func, "__name__", ""))
        writes = name in _WRITERS or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
        node = self._node(args, kwargs)

        def finish(result: Any) -> None:
            with self._ours():
                if node is not None and (writes or next(tensors_in_objects(result), None) is not None):
                    node.function, node.changes = func, writes
                    self._add(node, list(args[:1]) if writes else list(tensors_in_objects(result)))

        return finish

    def module(self, root: int, path: str, args: Any, kwargs: Any) -> Callable[[Any], None]:
        """Return the callback that records the result of a call of a model's module."""
        self._armed = True
        node = self._node(args, kwargs)

        def finish(result: Any) -> None:
            with self._ours():
                if node is not None:
                    node.root, node.path = root, path
                    self._add(node, list(tensors_in_objects(result)))
            self.last = result

        return finish

    def same(self, value: Any, like: Any) -> None:
        """Record `value` as the same node of the tape as `like`: an output of DDP's wrapper, a scaled loss."""
        with self._ours():
            own, other = list(tensors_in_objects(value)), list(tensors_in_objects(like))
            for new, old in zip(own, other, strict=len(own) == len(other)):
                if id(old) in self._known:
                    self._known[id(new)] = (new, self._known[id(old)][1])

    def backward(self, loss: Any, *, keep: bool) -> Tape | None:
        """Return the tape that ends at a loss; None, with a reason in `trouble`, if it cannot reproduce the loss."""
        tape = None
        with self._ours():
            entry = self._known.get(id(loss))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                self.trouble = self.trouble or "backward was not called on one scalar loss"
            elif entry is None or not isinstance(entry[1], Made):
                self.trouble = self.trouble or "the loss does not follow from the model by functions of torch alone"
            else:
                tape = self._tape(entry[1])
        if not keep:
            self._clear()
        return tape

    def forget(self) -> None:
        """Start a new record after an optimizer step."""
        self._calls.clear()  # of some an exception may have kept the end from being seen
        self._clear()

    # --- writing down ---

    def _follows(self, tensor: Tensor) -> bool:
        entry = self._known.get(id(tensor))
        return entry is not None and entry[0] is tensor and not isinstance(entry[1], Constant)

    def _node(self, args: Any, kwargs: Any) -> Node | None:
        with self._ours():
            device = next((t.device.type for t in tensors_in_objects((args, kwargs))), "cpu")
            operands = mapped(
                (tuple(args), kwargs), lambda v: self._operand(v) if isinstance(v, Tensor) else v, kinds=True
            )
            return Node(arguments=operands, grad=torch.is_grad_enabled(), autocast=Autocast.now(device))
        return None

    def _operand(self, tensor: Tensor) -> Operand:
        entry = self._known.get(id(tensor))
        if entry is not None and entry[0] is tensor:
            return entry[1]
        self._constants.append(copy_of(tensor))
        operand = Constant(len(self._constants) - 1)
        self._known[id(tensor)] = (tensor, operand)
        return operand

    def _add(self, node: Node, results: list[Any]) -> None:
        self._nodes.append(node)
        for place, tensor in enumerate(results):
            if isinstance(tensor, Tensor):
                self._known[id(tensor)] = (tensor, Made(len(self._nodes) - 1, place))

    def _tape(self, loss: Made) -> Tape | None:
        needed = needed_for(self._nodes, loss)
        if all(self._nodes[number].function is not None for number in needed):
            self.trouble = self.trouble or "the loss does not follow from the model"
            return None
        return Tape(
            nodes=list(self._nodes),
            constants=list(self._constants),
            loss=loss,
            needed=needed,
        )

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        before, self._own = self._own, True
        try:
            yield
        except Exception as error:
            if is_users(error):
                raise
            self.trouble = self.trouble or text_of(error)
        finally:
            self._own = before
