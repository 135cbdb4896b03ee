"""Records tapes in a running script: one for each backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.capture.nested import copy_of, mapped, tensors
from ddpdebug.preflight.capture.tape import READS, Constant, Made, Node, Tape, Weight, needed_for

_WRITERS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"})
Operand = Made | Weight | Constant


class Root:
    """A model of the script, and its copy from before the first step."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.copy = copied(module)
        self.paths = {id(part): name for name, part in module.named_modules()}
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.tensors = [*module.named_parameters(), *module.named_buffers()]


class Recorder(TorchFunctionMode):
    """Sees the functions of torch. Between a model's forward and backward it writes down what follows from the model.

    Nothing of it may reach the script: where recording fails, the tape is spoiled and says why.
    """

    def __init__(self) -> None:
        super().__init__()
        self.roots: list[Root] = []
        self.trouble: str | None = None
        self.done = False
        self.last: Any = None  # what a model returned last
        self._known: dict[int, tuple[Tensor, Operand]] = {}
        self.busy = False  # ours, or inside a model: nothing to write down
        self._clear()

    def _clear(self) -> None:
        self._nodes: list[Node] = []
        self._constants: list[Tensor] = []
        self._read: set[str] = set()
        self._armed = False
        self._known.clear()
        for number, root in enumerate(self.roots):
            for name, tensor in root.tensors:
                self._known[id(tensor)] = (tensor, Weight(number, name))

    def add(self, root: Root) -> None:
        """Follow a model from now on."""
        self.roots.append(root)
        for name, tensor in root.tensors:
            self._known[id(tensor)] = (tensor, Weight(len(self.roots) - 1, name))

    # --- what the script does ---

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy or self.done or not self._armed:
            return func(*args, **kwargs)
        return self.follow(func, args, kwargs)

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function; write it down if it takes something that follows from the model."""
        if self.busy or not self._armed or not any(self._follows(t) for t in tensors((args, kwargs))):
            return func(*args, **kwargs)
        name = str(getattr(func, "__name__", ""))
        writes = name in _WRITERS or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
        node = self._node(args, kwargs)
        result = func(*args, **kwargs)
        if name in READS:
            self._read.add(name.strip("_"))
        with self._ours():
            if node is not None and (writes or next(tensors(result), None) is not None):
                node.function, node.changes = func, writes
                self._add(node, list(args[:1]) if writes else list(tensors(result)))
        return result

    def call(self, root: int, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module of a model and write it down."""
        self._armed = True
        node = self._node(args, kwargs)
        with self.inside():
            result = forward(*args, **kwargs)
        with self._ours():
            if node is not None:
                node.root, node.path = root, path
                self._add(node, list(tensors(result)))
        self.last = result
        return result

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Within a model nothing is written down."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def same(self, value: Any, like: Any) -> None:
        """Note that `value` stands for `like`: what DDP returns, a scaled loss."""
        with self._ours():
            own, other = list(tensors(value)), list(tensors(like))
            for new, old in zip(own, other, strict=len(own) == len(other)):
                if id(old) in self._known:
                    self._known[id(new)] = (new, self._known[id(old)][1])

    def backward(self, loss: Any, *, keep: bool) -> Tape | None:
        """End the tape at a loss; None, and a reason in `trouble`, where it cannot be computed from it."""
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
        """Begin anew, after an optimizer step."""
        self._clear()

    # --- writing down ---

    def _follows(self, tensor: Tensor) -> bool:
        entry = self._known.get(id(tensor))
        return entry is not None and entry[0] is tensor and not isinstance(entry[1], Constant)

    def _node(self, args: Any, kwargs: Any) -> Node | None:
        with self._ours():
            device = next((t.device.type for t in tensors((args, kwargs))), "cpu")
            cast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
            operands = mapped((tuple(args), kwargs), lambda v: self._operand(v) if isinstance(v, Tensor) else v)
            return Node(arguments=operands, grad=torch.is_grad_enabled(), autocast=cast)
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
            read=tuple(sorted(self._read)),
            needed=needed,
        )

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        before, self.busy = self.busy, True
        try:
            yield
        except Exception as error:  # noqa: BLE001 - nothing of ours reaches the script
            self.trouble = self.trouble or f"{type(error).__name__}: {error}"
        finally:
            self.busy = before
