"""Experiments on copies: a check never trains the caller's objects, and the random state is restored.

Copies share nothing that a step writes: parameters, buffers, the attributes of modules and the tensors of a batch are
new; a batch's other objects are copied where they can be.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ddpdebug.isolation.process_state import kept_random_state
from ddpdebug.nested import copy_of, mapped
from ddpdebug.preflight.output.results import Check, Status, named
from ddpdebug.preflight.subject import LossOf

_MAX_ERROR = 300


def copy_of_batch(value: Any) -> Any:
    """Return a batch with copied tensors; objects that cannot be copied stay the same."""

    def fresh(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return copy_of(item)
        try:
            return copy.deepcopy(item)
        except Exception:  # noqa: BLE001 - a file handle, a tokenizer of native code: the loss gets the original
            return item

    return mapped(value, fresh)


@contextlib.contextmanager
def looking(
    modules: Mapping[str, torch.nn.Module],
    *,
    before: Callable[[str, torch.nn.Module, Any, Any], None] | None = None,
    after: Callable[[str, torch.nn.Module, Any], None] | None = None,
) -> Iterator[None]:
    """Hook the forwards of modules of a model copy for the duration of the body.

    Args:
        modules: by name, which the hooks are given.
        before: called with (name, module, args, kwargs).
        after: called with (name, module, output), also where the forward raises: the output is None then.
    """
    handles: list[Any] = []
    for name, module in modules.items():
        if before is not None:
            enter = functools.partial(before, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        if after is not None:
            handles.append(module.register_forward_hook(functools.partial(_leave, after, name), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leave(after: Callable[..., None], name: str, module: torch.nn.Module, _: Any, output: Any) -> None:
    after(name, module, output)


class NoGradientError(RuntimeError):
    """The loss depends on no trainable parameter."""


def backward(loss: torch.Tensor) -> None:
    """Compute the gradients of a loss.

    Raises:
        NoGradientError: there are none to compute.
    """
    if not loss.requires_grad:
        raise NoGradientError("the loss depends on no parameter that is trainable: nothing can be learned from it")
    loss.backward()


def take_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf, batches: Sequence[Any]
) -> float:
    """Take one optimizer step on the mean loss of the batches; return that loss."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss, _ = loss_of(model, batch)
        backward(loss / len(batches))
        total += float(loss.detach()) / len(batches)
    optimizer.step()
    return total


def attempt(name: str, examine: Callable[[], list[Check]]) -> list[Check]:
    """Run a check and return its results under its name; one that raises is skipped with its error."""
    try:
        with kept_random_state(), torch.enable_grad():
            return named(name, examine())
    except Exception as error:  # noqa: BLE001 - one check that cannot be done takes no other with it
        words = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
        return [Check(Status.SKIPPED, f"could not be done: {words}", name=name)]
