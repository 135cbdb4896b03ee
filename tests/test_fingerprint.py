"""Fingerprints see every bit and every position, and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from ddpdebug import device_fingerprint, fingerprint as fp
from ddpdebug.device_fingerprint import device_fingerprints

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex128, torch.complex64,
]  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.6 has not
    DTYPES.append(torch.float8_e8m0fnu)
MANY = settings(max_examples=300, deadline=None)

Path = Callable[[Tensor], int]


def on_device(tensor: Tensor) -> int:
    """Run the path for devices on a CPU tensor."""
    return int(device_fingerprints([tensor]))


@pytest.fixture(params=[fp.fingerprint, on_device], ids=["host", "device"])
def path(request: pytest.FixtureRequest) -> Path:
    """Each of the two ways to compute a fingerprint."""
    chosen: Path = request.param
    return chosen


PATHS = (fp.fingerprint, on_device)
contents = st.binary(min_size=16, max_size=512).map(lambda data: data[: len(data) // 16 * 16])


def tensor_of(data: bytes, dtype: torch.dtype) -> Tensor:
    """Build a tensor that has exactly these bits; bool takes 0 and 1 only."""
    raw = torch.tensor(list(data), dtype=torch.uint8)
    return (raw & 1).view(torch.bool) if dtype is torch.bool else raw.view(dtype)


@pytest.mark.smoke
@MANY
@given(data=contents, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1 << 30))
def test_a_single_flipped_bit_is_seen(data: bytes, dtype: torch.dtype, seed: int) -> None:
    """One bit changed anywhere in any dtype changes both fingerprints."""
    bit = seed % (8 * len(data)) if dtype is not torch.bool else 8 * (seed % len(data))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    for path in PATHS:
        assert path(tensor_of(data, dtype)) != path(tensor_of(bytes(flipped), dtype))


@MANY
@given(data=contents, dtype=st.sampled_from(DTYPES), shuffle=st.randoms())
def test_a_permutation_is_seen(data: bytes, dtype: torch.dtype, shuffle: object) -> None:
    """Elements in another order have another fingerprint."""
    tensor = tensor_of(data, dtype)
    order = list(range(len(tensor)))
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    moved = tensor_of(data, torch.uint8).view(len(tensor), -1)[order].reshape(-1)
    moved = (moved & 1).view(torch.bool) if dtype is torch.bool else moved.view(dtype)
    same = bits(moved) == bits(tensor)
    for path in PATHS:
        assert (path(moved) == path(tensor)) is same


@MANY
@given(data=contents, dtype=st.sampled_from(DTYPES), positions=st.tuples(st.integers(0, 511), st.integers(0, 511)))
def test_two_swapped_elements_are_seen(data: bytes, dtype: torch.dtype, positions: tuple[int, int]) -> None:
    """Two elements that change places are seen unless they are equal."""
    tensor = tensor_of(data, dtype)
    i, j = (p % len(tensor) for p in positions)
    rows = tensor.view(torch.uint8).view(len(tensor), -1)
    swapped = rows.clone()
    swapped[[i, j]] = rows[[j, i]]
    other = swapped.reshape(-1).view(dtype)
    for path in PATHS:
        assert (path(other) == path(tensor)) is (bits(other) == bits(tensor))


def bits(tensor: Tensor) -> bytes:
    """Return the elements' bits in logical order, computed the slow way."""
    return bytes(tensor.contiguous().view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
def test_a_moved_sign_of_zero_is_seen(path: Path, dtype: torch.dtype) -> None:
    """The sign bits of two zeros change places: the case that odd weights of 64-bit words cannot see."""
    tensors = [torch.zeros(64, dtype=dtype) for _ in range(64)]
    for i, tensor in enumerate(tensors):
        tensor[i] = -0.0
    assert len({path(tensor) for tensor in [*tensors, torch.zeros(64, dtype=dtype)]}) == 65


def test_constants_are_told_apart(path: Path) -> None:
    """Constant tensors, for which exclusive-or digests cancel, have different fingerprints."""
    values = [0.0, -0.0, 0.01, 0.5, 1.0, -1.0, 2.0, float("inf"), float("-inf"), float("nan")]
    assert len({path(torch.full((4096,), value)) for value in values}) == len(values)


def test_constants_of_different_length_are_told_apart(path: Path) -> None:
    """Zeros of other lengths have other fingerprints."""
    assert len({path(torch.zeros(n)) for n in range(100)}) == 100


def test_payloads_of_nan_are_told_apart(path: Path) -> None:
    """Two NaN with different payloads are different contents."""
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert path(quiet) != path(other)
    assert path(quiet) == path(quiet.clone())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(path: Path, dtype: torch.dtype) -> None:
    """Transposed, sliced, expanded and offset views count as the copies with the same elements."""
    base = tensor_of(bytes(range(256)) * 3, dtype)[: 4 * 3 * 2].reshape(4, 3, 2)
    zero_dim = base[1, 2, 1]
    views = [base.permute(2, 0, 1), base[:, 1:], base[1], base[::2, :, 1], zero_dim, zero_dim.expand(7), base[:, :1]]
    for view in views:
        copy = torch.empty_like(view, memory_format=torch.contiguous_format).copy_(view)
        assert path(view) == path(copy)


def test_a_zero_dimensional_tensor_counts_as_one_element(path: Path) -> None:
    """The shape is no part of the fingerprint."""
    assert path(torch.tensor(3.5)) == path(torch.tensor([[3.5]])) == path(torch.tensor([3.5]))


def test_lazily_conjugated_and_negated_views_count_as_their_values(path: Path) -> None:
    """A view that carries a conjugate or negative bit has the fingerprint of what one reads from it."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert path(z.conj()) == path(z.conj().resolve_conj()) != path(z)
    one = torch.tensor([1 + 2j]).conj().imag
    assert one.is_neg()
    assert path(one) == path(torch.tensor([-2.0]))


def test_tensors_without_elements_have_one_fixed_fingerprint() -> None:
    """Whatever their shape and dtype, and wherever they point."""
    empties = [torch.empty(0), torch.empty(3, 0, dtype=torch.int8), torch.ones(4)[2:2], torch.ones(0, 2).T]
    assert set(fp.fingerprints(empties)) == {fp.EMPTY} == {fp.of_bytes(b"")}
    assert len(set(device_fingerprints(empties).tolist())) == 1
    assert device_fingerprints([]).shape == (0,)


def test_nothing_has_the_fingerprint_zero() -> None:
    """0 means 'not computed', so no content may have it."""
    values = fp.fingerprints([torch.empty(0), torch.zeros(1), torch.zeros(8), torch.zeros((), dtype=torch.bool)])
    values += [fp.combine([]), fp.combine([0]), fp.of_bytes(b""), fp.of_text(""), fp.EMPTY, fp.NO_DATA]
    assert 0 not in values
    assert 0 not in device_fingerprints([torch.zeros(n, dtype=torch.int8) for n in range(20)]).tolist()


def test_tensors_without_data_have_one_fixed_fingerprint() -> None:
    """Meta, lazy, symbolic-zero and fake tensors, and those whose storage was freed, are named and never read."""
    from torch._subclasses import FakeTensorMode

    freed = torch.randn(100)[10:]
    strided = torch.randn(100)[10::2]
    for tensor in (freed, strided):
        tensor.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(3)
    lazy = torch.nn.parameter.UninitializedParameter()
    tensors = [torch.ones(3, device="meta"), freed, strided, fake, lazy, torch._efficientzerotensor((3,))]
    assert fp.fingerprints(tensors) == [fp.NO_DATA] * len(tensors)
    assert [fp.sampled_fingerprint(t, 1) for t in tensors] == [(fp.NO_DATA, False)] * len(tensors)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_and_nested_tensors_count_by_their_parts() -> None:
    """Sparse tensors agree when their coalesced indices and values do."""
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    twice = torch.sparse_coo_tensor([[1, 0, 1], [0, 1, 0]], [1.0, 2.0, 2.0], (2, 2))
    assert fp.fingerprint(twice) == fp.fingerprint(dense.to_sparse())
    kinds = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((1, 1))]
    kinds += [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    for tensor in kinds:
        assert fp.fingerprint(tensor) == fp.fingerprint(tensor.clone()) != fp.fingerprint(tensor * 2)


class Noisy(Tensor):
    """A subclass that must not be asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in {"clone", "contiguous", "view", "resolve_conj", "resolve_neg", "reshape"}:
            raise RuntimeError(f"the subclass was asked to {func.__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Pair(Tensor):
    """A wrapper subclass without memory of its own."""

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor) -> Self:
        """Wrap two tensors."""
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the wrapped tensors."""
        return ["left", "right"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_subclasses_are_read_without_running_their_code() -> None:
    """A subclass counts by its memory, a wrapper by what it wraps."""
    plain = torch.arange(12.0).reshape(3, 4)
    noisy = plain.as_subclass(Noisy)
    assert fp.fingerprint(noisy) == fp.fingerprint(plain)
    assert fp.fingerprint(plain.T.as_subclass(Noisy)) == fp.fingerprint(plain.T)
    assert fp.fingerprint(torch.nn.Parameter(plain)) == fp.fingerprint(plain)
    left, right = torch.ones(2), torch.zeros(2)
    assert fp.fingerprint(Pair(left, right)) == fp.combine(fp.fingerprints([left, right]))
    assert fp.sampled_fingerprint(Pair(left, right)) == (fp.fingerprint(Pair(left, right)), False)


def test_nothing_is_changed_by_looking(path: Path) -> None:
    """The random state, the version counter, the gradient graph and the elements stay as they were."""
    leaf = torch.randn(6, 5, requires_grad=True)
    result = (leaf * 2).T
    before = (torch.get_rng_state().clone(), result._version, leaf._version, result.detach().clone())
    path(result)
    fp.sampled_fingerprint(result, 16)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (result._version, leaf._version) == before[1:3]
    assert torch.equal(result, before[3])
    (gradient,) = torch.autograd.grad(result.sum(), leaf)
    assert torch.equal(gradient, torch.full_like(leaf, 2.0))


def test_it_works_in_inference_mode(path: Path) -> None:
    """Inference tensors, which have no version counter, are read like others."""
    with torch.inference_mode():
        tensor = torch.arange(12.0).reshape(3, 4)
        assert path(tensor.T) == path(tensor.T.contiguous())


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large non-contiguous tensors are read piece by piece with the same result."""
    tensor = torch.arange(7 * 11 * 13 * 5).reshape(7, 11, 13, 5)
    views = [tensor.permute(3, 1, 0, 2), tensor.permute(1, 0, 3, 2), tensor[::2, 1:, ::3]]
    views.append(tensor[:1].expand(9, 11, 13, 5))
    whole = fp.fingerprints([view.contiguous() for view in views])
    for size in (8, 64, 500, 3000):
        monkeypatch.setattr(fp, "CHUNK_BYTES", size)
        assert fp.fingerprints(views) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float64])
def test_long_tensors_are_seen_in_every_chunk_of_the_device_path(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Chunks that change places, and one element of any chunk, are seen."""
    monkeypatch.setattr(device_fingerprint, "CHUNK_WORDS", 32)
    tensor = torch.arange(200).to(dtype)
    seen = {on_device(tensor)}
    seen.add(on_device(torch.cat([tensor[64:128], tensor[:64], tensor[128:]])))
    for i in range(0, 200, 7):
        changed = tensor.clone()
        changed[i] += 1
        seen.add(on_device(changed))
    assert len(seen) == 2 + len(range(0, 200, 7))


def test_combining_is_sensitive_to_order_and_number() -> None:
    """Other orders, more and fewer values give other fingerprints; signed and unsigned forms are the same value."""
    assert len({fp.combine(v) for v in ([1, 2], [2, 1], [1], [1, 2, 0], [], [0])}) == 6
    assert fp.combine([-1]) == fp.combine([(1 << 64) - 1]) == fp.of_bytes(struct.pack("<Q", (1 << 64) - 1))


def test_texts_of_any_kind_have_fingerprints() -> None:
    """Also those that are no valid unicode."""
    assert len({fp.of_text(text) for text in ("a", "b", "ä", "\udcff", "")}) == 5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
def test_a_sample_covers_the_ends_and_the_length(dtype: torch.dtype) -> None:
    """The first and last elements, the length, and evenly spaced blocks between are part of the sample."""
    tensor = torch.ones(200_000, dtype=dtype)
    limit = 16 << 10
    reference = fp.sampled_fingerprint(tensor, limit)
    assert reference[1]
    longer = fp.sampled_fingerprint(torch.ones(200_016, dtype=dtype), limit)
    ends = []
    for i in (0, -1):
        changed = tensor.clone()
        changed[i] = 0
        ends.append(fp.sampled_fingerprint(changed, limit))
    assert len({reference, longer, *ends}) == 4
    third = tensor.clone()
    third[len(third) // 3 - 20_000 : len(third) // 3 + 20_000] = 0
    assert fp.sampled_fingerprint(third, limit) != reference


def test_a_sample_does_not_depend_on_strides() -> None:
    """Images in channels-last memory have the sampled fingerprint of their contiguous copy."""
    images = torch.arange(6 * 3 * 64 * 65, dtype=torch.float32).reshape(6, 3, 64, 65)
    last = images.to(memory_format=torch.channels_last)
    for view in (last, images.flip(0)[:, 1:], images.permute(3, 2, 1, 0), images[:, :1].expand(6, 3, 64, 65)):
        expected = fp.sampled_fingerprint(view.contiguous(), 1 << 16)
        assert fp.sampled_fingerprint(view, 1 << 16) == expected
        assert expected[1]


def test_small_tensors_are_not_sampled() -> None:
    """Up to the limit the sampled fingerprint is the fingerprint."""
    tensor = torch.arange(1000.0)
    assert fp.sampled_fingerprint(tensor) == (fp.fingerprint(tensor), False)
    assert fp.sampled_fingerprint(tensor, 0) == (fp.fingerprint(tensor), False)


def test_the_sample_on_a_device_covers_the_same_blocks() -> None:
    """The path for devices, run on the CPU, sees the ends and the length."""
    tensor = torch.ones(100_000)
    changed = tensor.clone()
    changed[-1] = 0
    first = tensor.clone()
    first[0] = 0

    def value(t: torch.Tensor) -> int:
        return fp._of_sample(fp._sample_on_device(t, 1 << 14), t.nbytes)

    assert len({value(t) for t in (tensor, changed, first, torch.ones(100_001), tensor[::1])}) == 4
    apart = torch.zeros(200_000)
    apart[::2] = changed
    assert value(apart[::2]) == value(changed)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_glance_reads_the_whole_of_small_and_unusual_tensors() -> None:
    """There it is the fingerprint itself."""
    large = torch.arange(300.0 * 300).reshape(300, 300)
    freed = torch.randn(100_000)
    freed.untyped_storage().resize_(0)
    unusual = [torch.ones(8), torch.empty(0), large.T, large.to_sparse(), large.to_sparse_csr(), freed]
    assert [fp.glance(tensor) for tensor in unusual] == fp.fingerprints(unusual)


def test_a_glance_at_a_large_tensor_sees_dense_changes() -> None:
    """Scaling, a shift of all elements, and the two ends."""
    large = torch.arange(1.0, 200_001.0)
    first, last = large.clone(), large.clone()
    first[0] = last[-1] = 0
    tensors = [large, large * 2, large + 1, first, last, large.flip(0)]
    assert len({fp.glance(tensor) for tensor in tensors}) == len(tensors)
    assert fp.glance(large) == fp.glance(large.clone())


def test_rows_that_each_lie_in_one_piece_are_told_without_a_copy() -> None:
    """A slice of columns has the fingerprints of its copy; what lies scattered, or is one row again and again, none."""
    whole = torch.arange(96, dtype=torch.int64).reshape(8, 12)
    for part in (whole[:, :-1], whole[:, 3:7], whole[2:5, :-1], whole.reshape(8, 3, 4)[:, 1:]):
        row = part.nbytes // len(part)
        assert not part.is_contiguous()
        assert fp.row_fingerprints(part, row, 64) == fp.row_fingerprints(part.contiguous(), row, 64) != []
    for part in (whole.T, whole[:, ::2], whole[:1].expand(8, 12), whole.reshape(8, 3, 4)[:, :, 1:]):
        assert fp.row_fingerprints(part, part.nbytes // len(part), 64) == []
