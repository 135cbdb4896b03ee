"""What is read later: on the CPU now, and of a device by a copy that is made by hand here, since there is none."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from ddpdebug import device_fingerprint, fingerprint, torch_internals as internals
from ddpdebug.isolation.user_code import is_users
from ddpdebug.probes import async_copy, gradients


class Copies:
    """Stands for the copies to the host: counts them, and lets nobody read one before it has arrived."""

    def __init__(self) -> None:
        self.made, self.arrived = 0, False

    def make(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Copy now; waiting for it fails until it has arrived."""
        self.made += 1
        return tensor.clone(), self.wait

    def wait(self) -> None:
        """Return once it has arrived."""
        assert self.arrived, "the training thread waits"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Copies by hand."""
    made = Copies()
    monkeypatch.setattr(async_copy, "_detached_copy", made.make)
    return made


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have `fingerprint.sample` take tensors of the CPU for a device's."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
    yield
    monkeypatch.undo()


@pytest.mark.parametrize("elements", [1, 1000, 300_000])
def test_a_sample_is_read_later(copies: Copies, on_a_device: None, elements: int) -> None:
    """It is the fingerprint that waiting gives, and the copy goes with the first reading."""
    tensor = torch.arange(float(elements))
    expected = fingerprint.sampled_fingerprint(tensor, 1 << 16)
    later, is_sample = async_copy.sampled(tensor, 1 << 16)
    copies.arrived = True
    assert (later(), is_sample) == expected
    copies.arrived = False
    assert later() == expected[0]
    assert copies.made == 1


def test_what_is_no_block_of_memory_is_read_now(copies: Copies) -> None:
    """Sparse tensors, empty ones, and whatever is on the CPU."""
    for tensor in (torch.eye(4).to_sparse(), torch.empty(0), torch.arange(9.0)):
        later, _ = async_copy.sampled(tensor, 1 << 16)
        assert later() == fingerprint.fingerprint(tensor)
    assert copies.made == 0


class _TritonError(Exception):
    """What Triton raises where it cannot compile a kernel: a class that is its own."""


_TritonError.__module__ = "triton.compiler.errors"


@pytest.mark.parametrize("error", [RuntimeError("failed to find C compiler"), _TritonError("mismatched types")])
def test_a_kernel_that_fails_is_given_up(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton raises at the first launch: torch's operations go on from there, and tell the same."""
    tries: list[str] = []
    # in a file of nobody's: what a test's own function raises is the user's
    known: dict[str, Any] = {"tries": tries, "error": error}
    exec(compile("def fused(words, launch): tries.append(launch); raise error", "<triton>", "exec"), known)
    monkeypatch.setattr(device_fingerprint, "_launch", lambda: "kernel")
    monkeypatch.setattr(device_fingerprint, "fused", known["fused"])
    monkeypatch.setattr(device_fingerprint._KERNEL, "given_up", False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    tensors = [torch.arange(5.0), torch.zeros(3)]
    expected = device_fingerprint.by_torch([fingerprint.words_of(t) for t in tensors])
    for _ in range(2):
        assert torch.equal(device_fingerprint.device_fingerprints(tensors, is_users), expected)
    assert tries == ["kernel"]


def test_a_memory_that_is_full_gives_no_kernel_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the job's, and by torch the same would take more."""

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device_fingerprint, "_launch", lambda: full)
    monkeypatch.setattr(device_fingerprint._KERNEL, "given_up", False)
    monkeypatch.setattr(device_fingerprint, "fused", full)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    with pytest.raises(torch.OutOfMemoryError):
        device_fingerprint.device_fingerprints([torch.zeros(1)])
    assert not device_fingerprint._KERNEL.given_up


def test_what_is_the_users_gives_no_kernel_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal's handler raises while the kernel is compiled goes on its way."""

    def interrupted() -> None:
        raise TimeoutError

    monkeypatch.setattr(device_fingerprint, "_launch", interrupted)
    monkeypatch.setattr(device_fingerprint._KERNEL, "given_up", False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    with pytest.raises(TimeoutError):
        device_fingerprint.device_fingerprints([torch.zeros(1)], lambda error: isinstance(error, TimeoutError))
    assert not device_fingerprint._KERNEL.given_up


def test_what_is_no_block_of_memory_is_copied_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets the memory of the others, with the same fingerprints in the same order."""
    given: list[int] = []

    def fused(words: Any, launch: Any) -> torch.Tensor:
        given.append(len(words))
        return device_fingerprint.by_torch(words)

    image = torch.arange(48.0).reshape(2, 3, 2, 4)
    tensors = [torch.arange(5.0), image.to(memory_format=torch.channels_last), torch.ones(3), image[:, 1]]
    expected = device_fingerprint.by_torch([tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors])
    monkeypatch.setattr(device_fingerprint, "_launch", lambda: "kernel")
    monkeypatch.setattr(device_fingerprint, "fused", fused)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    assert torch.equal(device_fingerprint.device_fingerprints(tensors), expected)
    assert torch.equal(device_fingerprint.device_fingerprints(tensors[1::2]), expected[1::2])
    assert given == [2]


def test_tensors_of_several_devices_are_told_in_their_order(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device makes its own copy; what is missing counts 0. Meta tensors stand for a device's."""
    monkeypatch.setattr(
        async_copy, "device_fingerprints", lambda some, _: torch.tensor([len(t) for t in some], dtype=torch.int64)
    )
    here, there = torch.ones(2), [torch.empty(n, device="meta") for n in (5, 7)]
    later = async_copy.digests([there[0], None, here, there[1]])
    copies.arrived = True
    assert later() == [5, 0, fingerprint.fingerprint(here), 7]
    assert copies.made == 1


class _Wrapping(torch.Tensor):
    """A tensor on a device that has two others, as DTensor has one."""

    @staticmethod
    def __new__(cls, *inner: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inner[0].shape, device="meta")
        made.one, made.other = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["one", "other"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_tensor_of_tensors_has_the_fingerprints_of_these(copies: Copies) -> None:
    """Whatever memory the outer one has: none."""
    one, other = torch.arange(3.0), torch.arange(4.0)
    outer = _Wrapping(one, _Wrapping(other, one))
    copies.arrived = True
    inner = fingerprint.combine(fingerprint.fingerprints([other, one]))
    expected = [0, fingerprint.combine([fingerprint.fingerprint(one), inner]), fingerprint.fingerprint(other)]
    later = async_copy.digests([None, outer, other])
    gone = weakref.ref(outer)
    del outer
    assert gone() is None
    assert later() == expected


class DTensor(_Wrapping):
    """Named as torch's: this rank's part of a tensor."""


_Here = type("AsyncCollectiveTensor", (torch.Tensor,), {})


def test_a_part_has_the_same_digest_on_all_ranks() -> None:
    """Whatever is in it, on the host and on a device, also at a glance."""
    whole = torch.ones(2)
    for n in (1.0, 2.0):
        part = DTensor(torch.full((3,), n), torch.ones(3))
        here = torch.full((3,), n).as_subclass(_Here)
        expected = [fingerprint.fingerprint(whole), fingerprint.NO_DATA, 0, fingerprint.NO_DATA]
        assert async_copy.digests([whole, part, None, here])() == expected
        at_a_glance = async_copy.glances([whole, here])
        assert at_a_glance is not None
        assert at_a_glance() == expected[:2]
    assert async_copy._is_part(part)
    assert not any(map(async_copy._is_part, (whole, torch.nn.Parameter(whole), None, _Wrapping(whole, whole))))


def test_the_norm_of_memory_that_is_gone_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would read it and end the process."""
    whole = torch.arange(10.0)
    view = whole[2:]
    whole.untyped_storage().resize_(0)
    assert float(gradients.norm_of(view)) == 0
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))
    assert not gradients._is_one_of_many(view)


def test_the_limit_of_a_device_is_the_share_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than there is, and all of it where nobody knows of a share."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (500, 1000), raising=False)
    for share, limit in ((0.25, 250), (1e11, 1000), (RuntimeError("no such thing here"), 1000)):

        def told(share: Any = share) -> float:
            if isinstance(share, Exception):
                raise share
            return float(share)

        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", told, raising=False)
        assert internals.device_memory_limit() == limit


def test_memory_that_is_gone_is_not_read() -> None:
    """FSDP frees it under a tensor that stays: no block for the kernel, and nothing for torch's operations."""
    whole = torch.arange(10.0)
    view = whole[2:]
    assert device_fingerprint._is_block(view)
    whole.untyped_storage().resize_(0)
    assert not device_fingerprint._is_block(view)
    assert device_fingerprint.by_torch([view]).tolist() == [fingerprint.signed(fingerprint.NO_DATA)]


def test_a_number_of_large_stride_has_words() -> None:
    """Torch calls it contiguous, and does not view it as smaller ones."""
    number = torch.arange(10.0, dtype=torch.float64)[5::5][:1]
    assert device_fingerprint.by_torch([number]).tolist() == device_fingerprint.by_torch([number.clone()]).tolist()


def test_triton_that_interprets_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read the device's addresses on the host."""
    monkeypatch.setitem(sys.modules, "ddpdebug.triton_kernels", SimpleNamespace(launch="launch"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert device_fingerprint._launch.__wrapped__() == "launch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device_fingerprint._launch.__wrapped__() is None


def test_norms_of_many_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, whatever their dtypes and layouts; what torch cannot take with others is taken by itself."""
    taken: list[int] = []
    together = gradients.internals.norms_there
    monkeypatch.setattr(
        gradients.internals, "norms_there", lambda some, dtype: (taken.append(len(some)), together(some, dtype))[1]
    )
    monkeypatch.setattr(gradients, "_MOST_ELEMENTS", 18)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))
    some: list[torch.Tensor] = [torch.arange(5.0), torch.ones(3, dtype=torch.bfloat16), torch.empty(0)]
    some += [torch.arange(6.0).to(torch.float64), torch.arange(4), torch.ones(4, 4)[::2, ::2], torch.full((), 2.0)]
    some += [torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last), torch.ones(2, dtype=torch.complex64)]
    some += [torch.ones(19)]
    found = gradients.norms_of(some)
    assert [float(norm) for norm in found] == [float(gradients.norm_of(tensor)) for tensor in some]
    assert [norm.dtype for norm in found] == [gradients.norm_of(tensor).dtype for tensor in some]
    assert taken == [3, 1, 1]  # float32, bfloat16, float64
