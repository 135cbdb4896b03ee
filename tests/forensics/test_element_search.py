"""The first element that differs, and the bits by which it does."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdebug.forensics.element_search import Elements, flipped_bits


def found(*weights: torch.Tensor) -> dict[str, Any]:
    """Return what ranks with these parameters find out together."""
    said: list[tuple[int, dict[str, Any]]] = []
    ranks = [
        Elements(rank, lambda kind, rank=rank, **fields: said.append((rank, fields))) for rank in range(len(weights))
    ]
    for elements, weight in zip(ranks, weights, strict=True):
        elements.begin("k", 0, "w", 3)
        elements.capture(SimpleNamespace(index=0, names=["w"], params=[weight]), 3)  # type: ignore[arg-type]
        elements.tick()
    results = []
    while said:
        rank, message = said.pop(0)
        results += [elements.hear(rank, message, len(weights)) for elements in ranks]
    return next((evidence for result in results if result for _, evidence in [result]), {})


def flipped(bit: int, *, at: int = 5, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a parameter, and the same with a bit flipped."""
    weight = torch.linspace(0.5, 1.0, 10_000).to(dtype)
    other = weight.clone()
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    other.view(whole)[at] ^= 1 << bit if bit < 8 * dtype.itemsize - 1 else torch.iinfo(whole).min
    return weight, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bit", [0, 6, 14, -1])
def test_a_flipped_bit_is_named(bit: int, dtype: torch.dtype) -> None:
    """Of any kind of number, the sign too; where in the parameter is said beside it."""
    bit %= 8 * dtype.itemsize
    evidence = found(*flipped(bit, dtype=dtype))
    assert (evidence["flipped_bits"], evidence["flat_index"]) == ([bit], 5)
    assert evidence["dtype"] in str(dtype)


def test_a_flip_of_a_high_bit_is_seen_steps_later() -> None:
    """The steps in between have changed the value that is right, and nothing of the one that is very large."""
    weight, other = flipped(30, at=5000)
    weight -= 0.01
    other -= 0.01
    assert found(weight, other)["flipped_bits"] == [30]


def test_two_numbers_are_no_flip() -> None:
    """Nor are several elements, which no memory flips at once, although each of them differs by a bit."""
    weight, other = flipped(20)
    other[5] += 0.3
    assert "flipped_bits" not in found(weight, other)
    weight, other = flipped(20)
    for more in (6, 9000):
        both = other.clone()
        both[more] = 2 * both[more]
        assert "flipped_bits" not in found(weight, both)


def test_a_factor_that_training_makes_is_no_flip() -> None:
    """Only exact patterns are evidence there."""
    one, other = (int.from_bytes(torch.tensor([x]).numpy().tobytes(), sys.byteorder) for x in (0.51, 1.07))
    assert flipped_bits(one, other, torch.float32) == []
