"""A training job whose pace can be spoilt on one rank: what `record.py` records and what the tests start.

    ddpdebug run --nproc-per-node 4 tests/slow/job.py --steps 200 --where forward --rank 2 --share 0.3

The time that is added is slept, not computed: a share of the step that the ranks measure first.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

#: Steps after which a step's usual time is known, and what is asked for begins.
MEASURED = 24


class Delay:
    """Sleeps where and when it was asked for."""

    def __init__(self, where: str, every: int) -> None:
        self.where, self.every = where, every
        self.seconds, self.step = 0.0, 0

    def at(self, where: str) -> None:
        """Sleep, if this is the place, the rank and the step."""
        if self.seconds and where == self.where and self.step % self.every == 0:
            time.sleep(self.seconds)


class Batches(Dataset):
    """Batches of noise, the same number on every rank."""

    def __init__(self, args: argparse.Namespace, rank: int, delay: Delay) -> None:
        self.args, self.rank, self.delay = args, rank, delay

    def __len__(self) -> int:
        return self.args.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        self.delay.at("data")
        if index < self.args.warm_up:
            time.sleep(0.04)
        size = self.args.batch
        if self.args.lengths == "cyclic":  # alike on all ranks, from step to step up to twice as long
            size += size * (index % 8) // 8
        elif self.args.lengths == "turns":  # another rank has the long batch in each step
            size *= 1 + (index % dist.get_world_size() == self.rank)
        elif self.args.lengths == "unequal":
            size *= 1 + (self.rank == self.args.rank)
        generator = torch.Generator().manual_seed(self.rank * 100_000 + index)
        return torch.randn(size, self.args.width, generator=generator)


class Model(nn.Module):
    """A few layers; sleeps in the middle of its forward and of its backward."""

    def __init__(self, width: int, delay: Delay) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.delay = delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.delay.at("forward")
        if h.requires_grad:
            h.register_hook(lambda _: self.delay.at("backward"))
        return self.second(h)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--where", default="none", help="data, forward, backward, optimizer or other")
    parser.add_argument("--rank", type=int, default=2, help="-1: all ranks")
    parser.add_argument("--share", type=float, default=0.0, help="of a step")
    parser.add_argument("--every", type=int, default=1, help="so many steps")
    parser.add_argument("--from-step", type=int, default=MEASURED, help="the step at which it begins")
    parser.add_argument("--lengths", default="equal", help="equal, cyclic, turns or unequal")
    parser.add_argument("--warm-up", type=int, default=0, help="so many batches come late, on all ranks")
    parser.add_argument("--networks", type=int, default=1, help="trained in turn, in each step; the last one is slow")
    parser.add_argument("--evaluate-every", type=int, default=0, help="rank 0 does, the others wait for it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    delay, none = Delay(args.where, args.every), Delay("none", 1)
    delays = [none] * (args.networks - 1) + [delay]
    models = [DistributedDataParallel(Model(args.width, one)) for one in delays]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    optimizers[-1].register_step_pre_hook(lambda *_: delay.at("optimizer"))
    times, began = [], time.perf_counter()
    for step, batch in enumerate(DataLoader(Batches(args, rank, delay), batch_size=None)):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = (model(batch) - batch.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        delay.at("other")
        if args.evaluate_every and step % args.evaluate_every == args.evaluate_every - 1 and rank == 0:
            with torch.no_grad():
                for _ in range(24):
                    models[0].module(batch)
        times.append(time.perf_counter() - began)
        began, delay.step = time.perf_counter(), step + 1
        if step + 1 == MEASURED:
            usual = torch.tensor(sorted(times[4:])[(len(times) - 4) // 2])
            dist.all_reduce(usual)
            usual /= dist.get_world_size()
        if step + 1 == max(MEASURED, args.from_step) and args.rank in {-1, rank}:
            delay.seconds = args.share * float(usual)
    if rank == 0:
        print(f"step_seconds={float(usual):.4f} added={args.share * float(usual):.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
