"""A parameter's checksum slot: one definition, for who sums its gradient in a step and for who adds up the slot."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.detectors.sync.sync204_not_the_mean import NotTheMean
from ddpdebug.probes.ddp_wrapper import SLOTS_PER_STEP
from ddpdebug.run_directory.reader import read_steps
from ddpdebug.schema.row import CHECKSUM_SLOTS

_STEPS = CHECKSUM_SLOTS // SLOTS_PER_STEP
#: Two large models with equal names of parameters, both stepped by one optimizer, which must call them otherwise.
_SCRIPT = f"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
models = [DDP(nn.Sequential(*(nn.Linear(280, 280) for _ in range(16)))) for _ in range(2)]
optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=1e-3)
for step in range({_STEPS}):
    optimizer.zero_grad()
    for model in models:
        model(torch.randn(4, 280, generator=torch.Generator().manual_seed(dist.get_rank()))).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.smoke
@pytest.mark.jobs
def test_one_optimizer_over_two_large_models_with_equal_names(run_jobs: Callable[..., Any], tmp_path: Path) -> None:
    """Each checked step has whole checksums of the slots whose turn it is, and SYNC204 can judge the step by them."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    options = ["--out", str(tmp_path / "run"), "--metrics", "off", "--every-step", "--quiet"]
    job = {"script": str(tmp_path / "train.py"), "cwd": str(tmp_path), "patient": True}
    (ranks,) = run_jobs([{**job, "options": options}])
    assert [rank["status"] for rank in ranks] == [0, 0], ranks
    steps = list(read_steps(tmp_path / "run"))
    assert len(steps) == _STEPS
    summed: list[int] = []
    for step in steps:
        assert all(all(row.local_norms) for row in step.rows.values())  # of all slots, in each step
        known = [slot for slot, total in enumerate(step.rows[0].reduced_sums) if math.isfinite(total)]
        assert len(known) == SLOTS_PER_STEP
        assert all(math.isfinite(row.local_sums[slot]) for row in step.rows.values() for slot in known)
        summed += known
        assert NotTheMean().can_show(step)
    assert sorted(summed) == list(range(CHECKSUM_SLOTS))
