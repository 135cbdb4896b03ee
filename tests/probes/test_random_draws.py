"""What the loop draws from random generators is seen, counted and not changed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ddpdebug.probes import random_draws
from ddpdebug.probes.random_draws import _held, _lines, _look_at
from ddpdebug.schema.announcements import DrawingLine


@pytest.mark.parametrize("before", [0, 1, 300, 620, 623, 624])
@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_numbers_of_a_twister_are_counted(before: int, count: int) -> None:
    """However far a block is used, a few draws are counted exactly."""
    own, plain = torch.Generator().manual_seed(3), random.Random(3)
    if before:
        torch.rand(before, generator=own)
        plain.getrandbits(32 * before)
    old = _look_at(own), _look_at(plain)
    torch.rand(count, generator=own)
    plain.getrandbits(32 * count)
    assert [a.numbers_to(b) for a, b in zip(old, (_look_at(own), _look_at(plain)), strict=True)] == [count, count]


def test_numbers_of_a_congruential_generator_are_counted() -> None:
    """The distance of two states of NumPy's default generator is the number of its steps."""
    generator = np.random.default_rng(5)
    old = _look_at(generator)
    generator.random(1234)
    assert old.numbers_to(_look_at(generator)) == 1234


def test_many_numbers_are_never_counted_as_more() -> None:
    """Of draws beyond a block only a part shows."""
    generator = torch.Generator().manual_seed(0)
    for count in (600, 700, 5000):
        old = _look_at(generator)
        torch.rand(count, generator=generator)
        assert 0 <= (old.numbers_to(_look_at(generator)) or 0) <= count


def test_seeding_is_no_draw() -> None:
    """A generator that is seeded again, also by another number, has drawn nothing."""
    for seed in (4, 5):
        generator, plain = torch.Generator().manual_seed(4), random.Random(4)
        torch.rand(30, generator=generator)
        plain.random()
        old = _look_at(generator), _look_at(plain)
        generator.manual_seed(seed)
        plain.seed(seed)
        assert [a.numbers_to(b) for a, b in zip(old, (_look_at(generator), _look_at(plain)), strict=True)] == [0, 0]


def test_looking_draws_nothing() -> None:
    """The generators go on as if nobody had looked."""
    generators = (torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1))
    expected = (torch.rand(2, generator=generators[0]).tolist(), generators[1].random(), generators[2].random())
    again = (torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1))
    for generator in again:
        assert _look_at(generator) == _look_at(generator)
    assert (torch.rand(2, generator=again[0]).tolist(), again[1].random(), again[2].random()) == expected


def _found() -> tuple[dict[str, object], object]:
    """Return what is found in this function, which asks for its own variables nowhere."""
    rng, own = np.random.default_rng(0), torch.Generator()
    again, unlike = rng, own.device
    del unlike
    return dict(_held(sys._getframe())), again


def test_generators_in_variables_are_found_by_name() -> None:
    """Those of the function that runs, each once."""
    found, rng = _found()
    assert found["rng (numpy)"] is rng
    assert "own (torch)" in found
    assert list(found.values()).count(rng) == 1


@pytest.mark.parametrize("make", [torch.Generator, random.Random, np.random.default_rng])
def test_generators_of_the_job_are_not_kept_alive(make: Callable[[], object]) -> None:
    """A generator that the job has let go of goes at the next look at the latest, also one of NumPy's."""
    generator = make()
    held = random_draws._weakly(generator)
    assert held() is generator
    box = [generator]
    del generator
    assert held() is box[0]
    box.clear()
    assert held() is None


def test_lines_of_the_loop_are_named() -> None:
    """Calls that draw, in the loop and in what it calls; what has a generator of its own is left out."""

    def noise(x: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(x)

    frame, own = sys._getframe(), torch.Generator()
    for _ in range(1):
        rows = torch.randint(0, 4, (2,))
        noise(rows.float())
        np.random.permutation(2)  # noqa: NPY002 - what people call
        torch.rand(2, generator=own)
        found = list(_lines(frame))
    assert {(line.function, line.family, line.chooses) for line in found} == {
        ("randint", "torch", True),
        ("permutation", "numpy", True),
        ("randn_like", "torch", False),
    }


def test_outside_of_a_loop_nothing_is_named() -> None:
    """What stands beside a call that trains, in a function without a loop, may have been drawn once."""
    torch.randn(2)

    def trainer() -> list[DrawingLine]:
        return list(_lines(sys._getframe()))

    assert trainer() == []
    assert [[line.function for line in trainer()] for _ in range(1)] == [[]]
    for _ in range(1):
        torch.rand(1)
        found = trainer()
    assert [line.function for line in found] == ["rand"]


def test_another_form_of_the_state_is_not_read() -> None:
    """Where torch writes its state in another way no number of draws is known."""
    assert random_draws._twister(b"\0" * 100).used is None
