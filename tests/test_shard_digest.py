"""The digest of a whole is the sum of those of its shards, and anything that changes changes it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddpdebug import shard_digest as module
from ddpdebug.errors import UsageError
from ddpdebug.shard_digest import digest_number, shard_digest

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let small tensors go through all that large ones do: several periods, rows of them, and scattered pieces."""
    for name, value in {"_PERIOD": 16, "_BITS": 4, "_ROWS": 2, "_SCATTERED": 8}.items():
        monkeypatch.setattr(module, name, value)
    module._table.cache_clear()
    yield
    module._table.cache_clear()


def digest(tensor: Tensor, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> int:
    return digest_number(int(shard_digest(tensor, offset, shape)))


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a tensor of random bits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], torch.dtype, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    cuts = [sorted(draw(st.sets(st.integers(0, n), max_size=2)) | {0, n}) for n in shape]
    return shape, cuts, draw(st.sampled_from(DTYPES)), tuple(draw(st.permutations(range(len(shape)))))


def shards(tensor: Tensor, cuts: list[list[int]]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield the parts of a tensor that is cut along all of its dimensions, with their places."""
    parts: list[tuple[Tensor, tuple[int, ...]]] = [(tensor, ())]
    for dim, places in enumerate(cuts):
        ends = [*pairwise(places)] or [(0, 0)]
        parts = [(part.narrow(dim, i, j - i), (*offset, i)) for part, offset in parts for i, j in ends]
    yield from parts


@given(splits())
def test_shards_add_up_to_the_whole(
    case: tuple[tuple[int, ...], list[list[int]], torch.dtype, tuple[int, ...]],
) -> None:
    """Cut along any dimensions, contiguous or not, of any dtype."""
    shape, cuts, dtype, order = case
    tensor = random(shape, dtype)
    whole = digest(tensor)
    assert digest_number(sum(digest(part, offset, shape) for part, offset in shards(tensor, cuts))) == whole
    assert digest_number(sum(digest(part.clone(), offset, shape) for part, offset in shards(tensor, cuts))) == whole
    strided = tensor.permute(order).contiguous().permute(tuple(order.index(i) for i in range(len(order))))
    assert digest(strided) == whole
    assert (whole == 0) is (not tensor.numel()) or not tensor.any()


@given(st.sampled_from(DTYPES), st.integers(0, 119), st.integers(0, 119))
def test_a_changed_element_and_two_that_change_places_are_seen(dtype: torch.dtype, i: int, j: int) -> None:
    """Wherever they are."""
    tensor = random((6, 20), dtype).contiguous()
    before, flat = digest(tensor), tensor.view(-1)
    changed = flat.clone()
    changed[i] = torch.ones((), dtype=torch.int8).to(dtype)
    changed_bits = not torch.equal(module.words_in(changed), module.words_in(flat))
    assert (digest(changed.view(6, 20)) != before) is changed_bits
    swapped = flat.clone()
    swapped[i], swapped[j] = flat[j].clone(), flat[i].clone()
    moved = not torch.equal(module.words_in(swapped), module.words_in(flat))
    assert (digest(swapped.view(6, 20)) != before) is moved


def test_bits_count() -> None:
    """The sign of zero and what is in a NaN."""
    assert digest(torch.tensor([0.0, 0.0])) != digest(torch.tensor([0.0, -0.0]))
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(nan[:1]) != digest(nan[1:])


def test_it_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest may be kept: these numbers change only on purpose, with the periods of real life."""
    monkeypatch.undo()
    module._table.cache_clear()
    assert digest(torch.arange(200_000)) == 0xE22F67A9CD8CA2B7
    assert (
        digest(torch.arange(200_000, dtype=torch.int16).view(2, -1)[:, 7:9], (0, 7), (2, 100_000)) == 0xD16EB1D67AE2D2D2
    )


class Sizes(TorchDispatchMode):
    """The bytes of what operations make, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view and out is not args[0]:
            self.found.append(out.nbytes)
        return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
def test_memory_is_bounded(dtype: torch.dtype, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the tensor, and whether it is one block."""
    monkeypatch.undo()
    module._table.cache_clear()
    tensor = torch.zeros(800, 700, dtype=dtype)
    tensor = tensor.t() if turned else tensor
    with Sizes() as sizes:
        shard_digest(tensor)
    assert max(sizes.found) * 2 <= module.CHUNK_BYTES < tensor.numel() * 8


@pytest.mark.parametrize(
    "tensor, offset, shape, message",
    [
        (torch.ones(4), (1,), (4,), "does not lie within"),
        (torch.ones(4), (0, 0), (4, 4), "does not lie within"),
        (torch.ones(4, device="meta"), None, None, "no data"),
        (torch.ones(4).to_sparse(), None, None, "sparse"),
    ],
)
def test_what_has_no_digest(
    tensor: Tensor, offset: tuple[int, ...] | None, shape: tuple[int, ...] | None, message: str
) -> None:
    """It is an error that says why."""
    with pytest.raises(UsageError, match=message):
        shard_digest(tensor, offset, shape)
