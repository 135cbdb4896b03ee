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
from ddpdebug.fingerprint import CHUNK_WORDS

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
    expected = device.by_torch(some).tolist()
    blocks = [tensor if device._is_block(tensor) else device._words_of(tensor) for tensor in some]
    assert device.fused(blocks, triton_kernels.launch).tolist() == expected  # with a new table
    assert device.fused(blocks, triton_kernels.launch).tolist() == expected  # with the table that is known

@settings(max_examples={examples}, deadline=None, derandomize=True)
@given(st.lists(tensors(), min_size=1, max_size=4))
def compare(some):
    same(some)

compare()
long = torch.arange(CHUNK_WORDS + 5).to(torch.int8)  # into the second chunk of the weights
words = torch.arange(CHUNK_WORDS + device.TILE + 5, dtype=torch.int32)
same([long, words, torch.ones(device.TILE + 1), torch.zeros(0)])
same([torch.ones(2 * device.TILE + 1)[1:], torch.ones(0)])
flipped = long.clone()
flipped[-1] ^= 1
one, other = (device.fused([t], triton_kernels.launch).tolist() for t in (long, flipped))
assert one != other
print("the same")
"""


def _path_of_triton() -> str | None:
    if importlib.util.find_spec("triton") is not None:
        return ""
    return str(BESIDE) if (BESIDE / "triton").is_dir() else None


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ddpdebug import triton_kernels
from ddpdebug.device_fingerprint import TILE
from ddpdebug.fingerprint import CHUNK_WORDS

kinds = {"places": "*i64", "tensor_of": "*i32", "sums": "*i64", "chunk_words": "constexpr", "tile_words": "constexpr"}
aligned = {(0,): [["tt.divisibility", 16]]}
source = ASTSource(triton_kernels._add_tiles, kinds, {(3,): CHUNK_WORDS, (4,): TILE}, aligned)
for capability in (80, 90):
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": triton_kernels._WARPS}
    built = triton.compile(source, target=target, options=options)
    assert built.asm["cubin"]
    assert "ld.global.v4" in built.asm["ptx"], "whole tiles are not read in the widest loads"
print("compiled")
"""


def _run(script: str, **env: str) -> str:
    """Run a script beside Triton; return what it has printed."""
    path = _path_of_triton()
    if path is None:
        if os.environ.get("DDPDEBUG_REQUIRE_TRITON"):
            pytest.fail("Triton is not there: make triton")
        pytest.skip("Triton is not there: make triton")
    environment = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_kernel_is_compiled_for_devices(tmp_path: Path) -> None:
    """Triton checks types only then: its interpreter takes what no device does."""
    assert _run(_COMPILE, TRITON_CACHE_DIR=str(tmp_path)) == "compiled\n"


@pytest.mark.smoke
def test_the_kernel_and_torch_agree_on_every_bit() -> None:
    """In Triton's interpreter, over dtypes, lengths, offsets and strides, and beyond one chunk of weights."""
    assert _run(_COMPARE.format(rows=90, examples=150), TRITON_INTERPRET="1") == "the same\n"
