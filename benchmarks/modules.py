"""What attaching costs by the number of modules: a step that is checked, one that is not, and a run's first steps.

    python benchmarks/modules.py [--modules 2000] [--rounds 5] [--steps 60] [--ddp]

One process that trains a chain of small modules of one parameter each, so that next to nothing of a step is computing
and all that is done for each module or parameter shows. Blocks of steps alternate in one run: plain, plain again (the
noise), and attached anew in each block, as `watch` attaches (`first`), with every step checked (`checked`) and with
none (`unchecked`). Of each block the first step is left out, in which lists are made. Printed is the median over the
rounds of the ratio to the plain block of the same round, with the quartiles: of the wall time, the processor time of
the process and that of the training thread. On a busy machine these are noisy. So `least` is the ratio of the training
thread's time where of each step the round counts in which it took least, and from it comes what the thread takes more,
in milliseconds a step and in microseconds a module. With `--ddp` the model is wrapped, in a group of one rank.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import ddpdebug
from ddpdebug.monitor.sampling import Schedule

WAYS = ("plain", "again", "unchecked", "first", "checked")
_WIDTH, _SAMPLES, _BLOCK = 4, 2, 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--ddp", action="store_true", help="wrap the model, in a group of one rank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer = _training(args.modules, wrapped=args.ddp)
    ways = ["plain", *(way for way in args.ways.split(",") if way != "plain")]
    times: dict[str, list[list[list[float]]]] = {way: [] for way in ways}
    for _ in range(3):
        _step(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            at = number % len(ways)
            for way in ways[at:] + ways[:at]:
                gc.collect()
                with _attached(way, model, optimizer, Path(folder) / f"{way}-{number}"):
                    _step(model, optimizer)
                    times[way].append(_clocked(lambda: _step(model, optimizer), args.steps - 1))
    _report(times, args.modules, args.steps - 1)
    if args.ddp:
        del model, optimizer
        dist.destroy_process_group()


def _training(modules: int, *, wrapped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of so many modules with weights, in blocks, and what trains it."""
    parts = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(modules)]
    model: nn.Module = nn.Sequential(*(nn.Sequential(*parts[i : i + _BLOCK]) for i in range(0, modules, _BLOCK)))
    for part in parts:
        nn.init.orthogonal_(part.weight)
    if wrapped:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.ones(_SAMPLES, _WIDTH)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@contextmanager
def _attached(way: str, model: nn.Module, optimizer: torch.optim.Optimizer, out: Path) -> Iterator[None]:
    """Attach as a user does, but for the steps that are checked."""
    if way in {"plain", "again"}:
        yield
        return
    checks = {"unchecked": lambda _self, _optimizer, step: step == 0}.get(way, Schedule.due)
    with mock.patch.object(Schedule, "due", checks):
        monitor = ddpdebug.watch(model, optimizer, out=out, metrics="off", quiet=True, every_step=way == "checked")
        try:
            yield
        finally:
            monitor.close()


def _clocked(step: Callable[[], None], count: int) -> list[list[float]]:
    """Return the seconds of each of some steps: of the wall, of the process and of this thread."""
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    found = []
    for _ in range(count):
        before = [clock() for clock in clocks]
        step()
        found.append([clock() - then for clock, then in zip(clocks, before, strict=True)])
    return found


def _report(times: dict[str, list[list[list[float]]]], modules: int, steps: int) -> None:
    least = {
        way: sum(min(step[2] for step in same) for same in zip(*blocks, strict=True)) for way, blocks in times.items()
    }
    sums = {
        way: [[sum(clock) for clock in zip(*block, strict=True)] for block in blocks] for way, blocks in times.items()
    }
    print(f"{modules} modules, a plain step takes the thread {least['plain'] / steps * 1e3:.1f} ms")
    print(f"{'':12}{'wall':>24}{'processor':>24}{'training':>24}{'least':>8}{'ms a step':>12}{'us a module':>14}")
    for way, blocks in sums.items():
        if way == "plain":
            continue
        row = ""
        for clock in range(3):
            ratios = [own[clock] / other[clock] for own, other in zip(blocks, sums["plain"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
            row += f"{f'{middle:.3f} [{low:.3f}, {high:.3f}]':>24}"
        more = (least[way] - least["plain"]) / steps
        row += f"{least[way] / least['plain']:>8.3f}{more * 1e3:>12.2f}{more / modules * 1e6:>14.2f}"
        print(f"{way:12}{row}", flush=True)


if __name__ == "__main__":
    main()
