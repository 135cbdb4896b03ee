"""Looks in a function's code: what a tracer of lines and a pickle by value see of them."""

import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.torch_internals.collective_calls import look_at_collectives
from ddpdebug.torch_internals.function_code import InCode, look_around
from ddpdebug.torch_internals.loss_functions import look_at_losses

_SEEN: list[int] = []


class Look(InCode):
    """A look that counts calls."""

    def __init__(self) -> None:
        self.idle, self.ends = False, 0

    def begins(self, args: Any, kwargs: Any) -> None:
        """Begin."""

    def ended(self, noted: Any, result: Any) -> Any:
        """End."""
        self.ends += 1
        return result

    def failed(self, noted: Any) -> None:
        """Fail."""
        raise AssertionError


def call_of_many_lines(value: int) -> None:
    _SEEN.append(
        value,
    )


def branch_without_other(value: int) -> None:
    if value:
        _SEEN.append(value)


def branches(value: int) -> None:
    if value > 1:
        _SEEN.append(1)
    elif value:
        _SEEN.extend(
            [2, 3],
        )
    else:
        if value < 0:
            return
        _SEEN.append(3)


def loop(value: int) -> None:
    for one in range(value):
        if one >= 0:
            _SEEN.append(one)
            continue


def context(value: int) -> None:
    with nullcontext():
        _SEEN.append(value)


def attempts(value: int) -> None:
    try:
        _SEEN.append(1 // value)
    except ZeroDivisionError:
        _SEEN.append(value)


def returns(value: int) -> int:
    if value:
        return value
    return _SEEN.append(value) or 1


def lines_of(function: Callable[[int], object], value: int) -> list[tuple[str, int]]:
    """Return the events and lines that a tracer sees."""
    seen: list[tuple[str, int]] = []

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_code.co_name != function.__name__:
            return None
        seen.append((event, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(value)
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(
    "function", [call_of_many_lines, branch_without_other, branches, loop, context, attempts, returns]
)
def test_a_tracer_sees_the_lines_of_the_function(function: Any, idle: bool) -> None:
    """Also where the function falls off its end."""
    plain = [lines_of(function, value) for value in (0, 1, 2, -1)]
    look = Look()
    undo = look_around(function, look)
    assert undo is not None
    look.idle = idle
    try:
        assert [lines_of(function, value) for value in (0, 1, 2, -1)] == plain
        assert look.ends == (0 if idle else 4)
    finally:
        undo()


def test_a_pickle_by_value_takes_nothing_of_the_looks_along() -> None:
    """The code of torch's functions leaves the process with optimizers and closures that dill takes by value."""
    guard = Guard(print)
    undo = [
        look_at_collectives(lambda *_: None, lambda: None, lambda: None),
        look_at_losses(lambda *_: None),
        entries_of(guard).close,
    ]
    kept = object()
    entries_of(guard).patch(
        torch.autograd, "backward", "the test", after=(("probe:test", lambda *_, **__: kept),), who=None
    )
    functions = (torch.distributed.all_reduce.__wrapped__, torch.nn.functional.mse_loss, torch.autograd.backward)
    try:
        for function in functions:
            looks = [one for one in function.__code__.co_consts if isinstance(one, InCode)]
            assert looks, function
            for look in looks:
                copied = pickle.dumps(look)
                assert b"ddpdebug" not in copied
                inert: Any = pickle.loads(copied)
                assert inert.idle if hasattr(look, "idle") else inert(7) in {None, 7}
    finally:
        for one in undo:
            one()
