"""What a script gives is read whole unless it is a large file that is mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ddpdebug.torch_internals import is_readable_memory

COUNT = 9 << 20  # 36 MiB in single precision


def test_memory_that_belongs_to_the_process() -> None:
    """Of torch, of numpy, and shared with a loader's worker."""
    assert is_readable_memory(torch.empty(COUNT))
    assert is_readable_memory(torch.from_numpy(np.empty(COUNT, np.float32)))
    assert is_readable_memory(torch.empty(COUNT).share_memory_())


def test_files_that_are_mapped(tmp_path: Path) -> None:
    """Shared or private, by torch or by numpy; a few rows of one are read by the job as well."""
    path = tmp_path / "table.bin"
    with path.open("wb") as file:
        file.truncate(4 * COUNT)
    shared = torch.from_file(str(path), shared=True, size=COUNT)
    assert not is_readable_memory(shared)
    assert is_readable_memory(shared[:1000])
    assert not is_readable_memory(torch.from_file(str(path), shared=False, size=COUNT))
    assert not is_readable_memory(torch.from_numpy(np.memmap(path, np.float32, "r+")))
