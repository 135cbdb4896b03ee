"""What is process-wide is put back bit for bit, and what nobody has changed is not touched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ddpdebug.isolation.process_state import Autocast, RandomState, kept_random_state, preserved


def state() -> list[Any]:
    return [
        random.getstate(),
        [np.random.get_state()[1].tolist(), *np.random.get_state()[2:]],  # noqa: NPY002 - the global generator
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ]


def draw() -> None:
    random.random()
    np.random.rand()  # noqa: NPY002 - the global generator
    np.random.standard_normal()  # noqa: NPY002 - which keeps a second number
    torch.rand(3)


def change() -> None:
    draw()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = True
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)


@pytest.mark.parametrize("plain", [True, False])
def test_everything_is_put_back(plain: bool) -> None:
    """Also when what runs in between raises."""
    before = state()

    def run() -> None:
        with preserved(plain=plain):
            change()
            assert all(a != b for a, b in zip(before, state(), strict=True))
            raise ValueError

    with pytest.raises(ValueError):
        run()
    assert state() == before


def test_what_it_begins_with() -> None:
    """As the caller has it, or as a new process."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with preserved():
            assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (False, True)
        with preserved(plain=True):
            assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (True, False)
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (False, True)


def test_random_state_can_be_taken_again() -> None:
    """The same numbers come each time."""
    with kept_random_state() as kept:
        first = [random.random(), np.random.rand(), torch.rand(1).item()]  # noqa: NPY002 - the global generator
        kept.restore()
        assert [random.random(), np.random.rand(), torch.rand(1).item()] == first  # noqa: NPY002


def test_generators_that_nobody_has_drawn_from_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set, for another thread may draw meanwhile."""
    kept = RandomState.now()

    def refuse(name: str) -> Callable[..., None]:
        return lambda *_: pytest.fail(name)

    monkeypatch.setattr(random, "setstate", refuse("python"))
    monkeypatch.setattr(np.random, "set_state", refuse("numpy"))
    kept.restore()


def test_autocast_again() -> None:
    """On where it was on, to the same dtype."""
    off = Autocast.now("cpu")
    with torch.autocast("cpu", torch.float16):
        on = Autocast.now("cpu")
    for known in (off, on):
        with known.again():
            assert Autocast.now("cpu") == known
