"""The tape of a loss: the recorded calls from the model's forward to `backward`, to be run again with another model.

A node is a call of a module of the model or of a function of torch. What a call takes is a result of an earlier node,
a parameter or buffer of the model, or a constant: inputs and labels. Control flow of Python is as in the recording.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddpdebug.isolation.process_state import Autocast
from ddpdebug.nested import copy_of, mapped, tensors_in_objects


@dataclass(frozen=True, slots=True)
class Made:
    """The tensor number `place` in the result of a node."""

    node: int
    place: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer of one of the models."""

    root: int
    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """An input tensor of the recording: data, not a result and not a parameter."""

    index: int


@dataclass(slots=True, kw_only=True)
class Node:
    """One call: of `function`, or of the module `path` of the model number `root`."""

    function: Callable[..., Any] | None = None
    root: int = 0
    path: str = ""
    arguments: Any = ()
    changes: bool = False  # its first argument
    grad: bool = True
    autocast: Autocast

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Set gradient mode and autocast as in the recording."""
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()), self.autocast.again(cache=True):
            yield


@dataclass(slots=True, kw_only=True)
class Tape:
    """The recorded calls of one backward of the script.

    Args:
        loss: where the loss is.
    """

    nodes: list[Node]
    constants: list[Tensor]
    loss: Made
    roots: int = 1
    needed: set[int] = field(default_factory=set)

    @property
    def inputs(self) -> tuple[Any, dict[str, Any]]:
        """The arguments of the model's first call, as far as they are constants."""
        first = next(node for node in self.nodes if node.function is None)
        args, kwargs = mapped(first.arguments, self._outside, kinds=True)
        return args, kwargs

    def _outside(self, item: Any) -> Any:
        return self.constants[item.index] if isinstance(item, Constant) else item

    def loss_of(self, model: nn.Module) -> tuple[Tensor, Any]:
        """Compute the loss with a model of the same structure; return the loss and the model's output."""
        results: dict[int, list[Any]] = {}
        weights: dict[str, Tensor] = {}
        copies: dict[int, Tensor] = {}  # of constants that are written into, or that a gradient goes to
        output: Any = None
        called = False

        def value(item: Any, *, own: bool = False) -> Any:
            if isinstance(item, Made):
                return results[item.node][item.place]
            if isinstance(item, Constant):
                constant = self.constants[item.index]
                if item.index not in copies and (own or constant.requires_grad):
                    copies[item.index] = copy_of(constant)
                return copies.get(item.index, constant)
            if isinstance(item, Weight):
                if not weights:
                    weights.update(model.named_parameters(remove_duplicate=False))
                    weights.update(model.named_buffers(remove_duplicate=False))
                return weights[self.place(item.root, item.name)]
            return item

        for number, node in enumerate(self.nodes):
            if number not in self.needed:
                continue
            module = node.function is None
            # a model may write into what it is given, and so do functions that say so
            args, kwargs = mapped(node.arguments, functools.partial(value, own=module or node.changes), kinds=True)
            call = model.get_submodule(self.place(node.root, node.path)) if node.function is None else node.function
            with node.settings():
                result = call(*args, **kwargs)
            results[number] = [args[0]] if node.changes else list(tensors_in_objects(result))
            if module and not called:
                output, called = result, True
        loss = value(self.loss)
        return loss, output

    def place(self, root: int, name: str) -> str:
        """Return a parameter's name in the examined model, which is a list if there are several models."""
        return name if self.roots == 1 else f"{root}.{name}".rstrip(".")


def loss_of(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Compute a recorded loss; the `loss_of` of a subject whose batches are tapes."""
    tape: Tape = batch
    return tape.loss_of(model)


def needed_for(nodes: list[Node], loss: Made) -> set[int]:
    """Return the nodes that the loss depends on; operations in place are always among them."""
    needed: set[int] = set()
    waiting = [loss.node, *(n for n, node in enumerate(nodes[: loss.node]) if node.changes and node.grad)]
    while waiting:
        number = waiting.pop()
        if number not in needed:
            needed.add(number)
            mapped(
                nodes[number].arguments,
                lambda item: waiting.append(item.node) if isinstance(item, Made) else None,
                kinds=True,
            )
    return needed
