"""Uses ddpdebug from Python in one of several ways; each rank writes what it saw to RESULTS/<rank>.json."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug

WAY, RESULTS = sys.argv[1], Path(sys.argv[2])


class Scaled(nn.Module):
    """A layer whose factor is no parameter, so that ranks may disagree about it unseen."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * self.layer(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, each: object = None) -> int:
    generator = torch.Generator().manual_seed(dist.get_rank())
    taken = 0
    for step in range(steps):
        loss = model(torch.randn(6, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        taken += 1
        if callable(each):
            each(step)
    return taken


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    seen: dict[str, object] = {}
    options = {"out": str(RESULTS / "run"), "metrics": "off", "quiet": True}
    if WAY == "wrapper":
        model = ddpdebug.DebugDDP(Scaled(1.0))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1 if rank == 0 else 0.2), 12)
        monitor = model.monitor
    elif WAY == "watch":
        model = DistributedDataParallel(Scaled(1.0))
        copy = Scaled(1.0)
        with ddpdebug.watch(model, **options) as monitor:
            monitor.watch_replica("average", copy)

            def each(step: int) -> None:
                with torch.no_grad():
                    copy.layer.bias.fill_(step + 10.0 * rank)

            train(model, torch.optim.AdamW(model.parameters(), lr=0.01), 12, each)
    elif WAY == "agree":
        model = DistributedDataParallel(Scaled(1.0 + rank))
        monitor = ddpdebug.watch(model, **options)
        before = torch.get_rng_state()
        monitor.agree(torch.ones(2, 4))
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), 30)
        seen["rng_untouched"] = torch.equal(before, torch.get_rng_state())
        seen["training"] = model.module.training
    else:
        model = DistributedDataParallel(Scaled(1.0))
        monitor = ddpdebug.watch(model, on_finding="raise", **options)
        counted = []
        try:
            train(model, torch.optim.SGD(model.parameters(), lr=0.1 + rank), 4000, counted.append)
        except ddpdebug.FindingError as error:
            seen["error"] = str(error)
        seen["steps"] = len(counted)
    monitor.close()
    monitor.close()
    seen["findings"] = [[f.code, f.step, list(f.ranks), list(f.subject)] for f in monitor.findings]
    (RESULTS / f"{rank}.json").write_text(json.dumps(seen))
    del model, monitor
    gc.collect()
    dist.destroy_process_group()


main()
