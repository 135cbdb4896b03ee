"""The one launch over all tensors gives the numbers that operations of torch give, bit for bit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: `make triton` puts it there: the torch for CPUs comes without, and would choose other ways in other tests with it.
BESIDE = ROOT / ".triton"

_COMPARE = """
import torch
from hypothesis import given, settings, strategies as st
from ddpdebug import device_fingerprint as device, triton_kernels
from ddpdebug.fingerprint import CHUNK_WORDS, words_of

ROWS = {rows}
SHAPES = st.lists(st.integers(0, ROWS), min_size=0, max_size=2)
TYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int16,
                         torch.uint8, torch.bool, torch.complex128, torch.complex64])

@st.composite
def tensors(draw):
    shape, dtype = draw(SHAPES), draw(TYPES)
    size = torch.Size([draw(st.integers(0, 2)), *shape]).numel() * dtype.itemsize + 16
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=g)
    if dtype is torch.bool:
        raw = raw & 1
    flat = raw.view(dtype)[draw(st.integers(0, 1)):]
    flat = flat[:torch.Size(shape).numel()] if len(flat) >= torch.Size(shape).numel() else flat
    made = flat.reshape(shape) if flat.numel() == torch.Size(shape).numel() else flat
    return made.t() if draw(st.booleans()) and made.ndim == 2 else made

def same(some):
    words = [words_of(tensor) for tensor in some]
    expected = device.by_torch(words).tolist()
    assert device.fused(words, triton_kernels.launch).tolist() == expected  # with a new table
    assert device.fused(words, triton_kernels.launch).tolist() == expected  # with the table that is known

@settings(max_examples={examples}, deadline=None, derandomize=True)
@given(st.lists(tensors(), min_size=1, max_size=4))
def compare(some):
    same(some)

compare()
long = torch.arange(CHUNK_WORDS + 5).to(torch.int8)  # into the second chunk of the weights
same([long, torch.ones(device.TILE), torch.ones(device.TILE + 1), torch.zeros(0)])
flipped = long.clone()
flipped[-1] ^= 1
one, other = (device.fused([words_of(t)], triton_kernels.launch).tolist() for t in (long, flipped))
assert one != other
print("the same")
"""


def _path_of_triton() -> str | None:
    if importlib.util.find_spec("triton") is not None:
        return ""
    return str(BESIDE) if (BESIDE / "triton").is_dir() else None


def test_the_kernel_and_torch_agree_on_every_bit() -> None:
    """In Triton's interpreter, over dtypes, lengths, offsets and strides, and beyond one chunk of weights."""
    path = _path_of_triton()
    if path is None:
        if os.environ.get("DDPDEBUG_REQUIRE_TRITON"):
            pytest.fail("Triton is not there: make triton")
        pytest.skip("Triton is not there: make triton")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)])),
    }
    script = _COMPARE.format(rows=90, examples=150)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr[-3000:]
