"""The digests of shards on CUDA are those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddpdebug.shard_digest import shard_digest

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64, torch.complex128)


@contextmanager
def unwaited(device: str) -> Iterator[None]:
    """Make a wait of the host an error."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def test_digests_of_shards_are_those_of_the_cpu(device: str) -> None:
    """Whole tensors of several periods, columns of them, strided ones; the host does not wait."""
    for dtype in _DTYPES:
        whole = torch.randint(0, 256, (700, 1000 * dtype.itemsize), dtype=torch.uint8).view(dtype)
        there = whole.to(device)
        shard_digest(there)  # makes the table of weights
        with unwaited(device):
            found = [
                shard_digest(there),
                shard_digest(there[:, 300:500], (0, 300), (700, 1000)),
                shard_digest(there.t()),
            ]
        expected = [shard_digest(whole), shard_digest(whole[:, 300:500].clone(), (0, 300), (700, 1000))]
        assert [int(digest) for digest in found] == [*map(int, expected), int(shard_digest(whole.t().clone()))], dtype
