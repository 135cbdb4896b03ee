"""The fingerprints of tensors on CUDA are those that the CPU computes by the same formula, by one launch over all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdebug import device_fingerprint, fingerprint
from ddpdebug.fingerprint import CHUNK_WORDS
from ddpdebug.probes import async_copy

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8)


def _tensors() -> list[torch.Tensor]:
    """Return tensors of many lengths and kinds, into the second chunk of the weights, on the CPU."""
    g = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=g)
    found = [raw[: 8 * n].view(dtype) for n in (0, 1, 31, 4096, 4097, 100_001) for dtype in _DTYPES]
    found += [found[10].reshape(-1, 1).t(), raw[: 1 << 14].view(torch.float32).reshape(64, 64).t()]
    found += [raw[:64].view(torch.complex64), (raw[:999] & 1).bool(), torch.arange(CHUNK_WORDS + 5, dtype=torch.int32)]
    half = torch.arange(99).to(torch.int16)
    found += [half, half[1:], torch.arange(99.0)[1:]]  # words of two bytes; addresses of no whole 16 bytes
    return [*found, torch.arange(CHUNK_WORDS + 5).to(torch.int8)]


@pytest.fixture
def there() -> list[torch.Tensor]:
    """The tensors on the device."""
    return [_moved(tensor) for tensor in _tensors()]


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.storage_offset():
        return tensor.to("cuda")
    whole = torch.zeros(tensor.storage_offset() + len(tensor), dtype=tensor.dtype, device="cuda")
    return whole[tensor.storage_offset() :].copy_(tensor)


@pytest.mark.gpu
def test_the_kernel_gives_the_numbers_of_the_cpu(there: list[torch.Tensor]) -> None:
    """Bit for bit, with a new table and with the one that is known; a flipped bit changes them."""
    assert device_fingerprint._launch() is not None, "Triton is not there: the kernel did not run"
    expected = device_fingerprint.by_torch(_tensors()).tolist()
    for _ in range(2):
        assert device_fingerprint.device_fingerprints(there).tolist() == expected
    there[-1][-1] ^= 1
    assert device_fingerprint.device_fingerprints(there).tolist()[-1] != expected[-1]
    assert not device_fingerprint._KERNEL.given_up


@pytest.mark.gpu
def test_operations_of_torch_give_the_same(there: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback, on the device."""
    monkeypatch.setattr(device_fingerprint._KERNEL, "given_up", True)
    expected = device_fingerprint.by_torch(_tensors()).tolist()
    assert device_fingerprint.device_fingerprints(there).tolist() == expected


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_all_tensors_take_one_launch() -> None:
    """One of the kernel, and the copy of what the sums begin with; by torch there are more than one a tensor."""
    tensors = [torch.ones(1000 + n, device="cuda") for n in range(200)]
    device_fingerprint.device_fingerprints(tensors)  # compiles, makes the table
    names = launches(lambda: device_fingerprint.device_fingerprints(tensors))
    assert sum("_add_tiles" in name for name in names) == 1, names
    assert len(names) <= 2, names


def launches(call: Any) -> list[str]:
    """Return the names of what a call starts on the device."""
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        torch.cuda.synchronize()
    on = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_samples_of_a_device_are_those_of_the_cpu_where_all_is_read(there: list[torch.Tensor]) -> None:
    """So that a batch of a loader is known again after its way to the device; nothing is waited for meanwhile."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        laters = [async_copy.sampled(tensor, 1 << 20) for tensor in there if tensor.numel()]
        digests = async_copy.digests(there)
        numbers = async_copy.numbers([tensor.double().sum() for tensor in there if tensor.dtype == torch.float32])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (later, is_sample), tensor in zip(laters, [t for t in _tensors() if t.numel()], strict=True):
        if not is_sample:
            assert later() == fingerprint.fingerprint(tensor)
    assert 0 not in digests()
    assert len(numbers()) == sum(tensor.dtype == torch.float32 for tensor in there)


_OTHER_STREAM = """
import torch
from ddpdebug.probes import async_copy
x = torch.zeros(1 << 26, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(200):
        x.add_(1)
    later = async_copy.numbers([x[-1]])
assert later() == [200.0], later()
print("waited for")
"""


@pytest.mark.gpu
def test_a_copy_is_waited_for_on_the_stream_that_makes_it() -> None:
    """Also where that is not the device's usual one."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_STREAM],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "waited for\n"), done.stderr[-3000:]
