"""What ddpdebug's threads cost beside the training thread, in processor time for each step.

    OMP_NUM_THREADS=1 python benchmarks/background.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/background.py --pause 0.02
    OMP_NUM_THREADS=1 python benchmarks/background.py --profile 40

A small multi-layer perceptron trains under `watch` with its defaults and writes a run directory. Printed is, for each
thread of ddpdebug's in rank 0, what it took between the first steps and the last one by its own clock of processor time,
so that other work on the machine counts little, and what it costs in all. `--pause` makes the steps longer by sleeping:
the thread takes several steps at a time where they are short. `--profile N` prints the N functions that take most of the
time of the thread that judges, and how many calls it makes for each step; a profiled thread takes several times as long.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug
from ddpdebug.exchange.ticks import BATCH_ROWS, Exchange
from ddpdebug.isolation import background


def clocks() -> dict[str, float]:
    """Return the processor time of each thread of ddpdebug's so far, by name."""
    found: dict[str, float] = {}
    for ident, name in background.names().items():
        found[name] = found.get(name, 0.0) + time.clock_gettime(time.pthread_getcpuclockid(ident))
    return found


def profiled(run: Callable[[Exchange], None], profile: cProfile.Profile) -> Callable[[Exchange], None]:
    """Return the loop of the exchange's thread under a profile."""

    def under_profile(exchange: Exchange) -> None:
        profile.enable()
        try:
            run(exchange)
        finally:
            profile.disable()

    return under_profile


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--first", type=int, default=100, help="steps that are not counted")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds slept in each step")
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--profile", type=int, default=0)
    parser.add_argument("--sort", default="tottime", choices=("tottime", "cumtime"))
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    profile = cProfile.Profile(time.thread_time)
    if options.profile:
        Exchange._run = profiled(Exchange._run, profile)  # type: ignore[method-assign]  # a benchmark looks inside
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monitor = ddpdebug.watch(
            model, optimizer, out=Path(folder) / "run" if rank == 0 else None, every_step=options.every_step, quiet=True
        )
        before, process = dict[str, float](), 0.0
        for step in range(options.steps):
            if step == options.first:
                before, process = clocks(), time.process_time()
            inputs, labels = torch.randn(16, 32), torch.randint(10, (16,))
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if options.pause:
                time.sleep(options.pause)
        exchange = monitor._exchange  # a benchmark looks inside
        while exchange is not None and len(exchange._rows) >= BATCH_ROWS:
            time.sleep(0.1)
        time.sleep(0.5)
        after, process = clocks(), time.process_time() - process
        ticks = 0 if exchange is None else exchange.ticks
        monitor.close()
        found = [finding.code for finding in monitor.findings]
    if rank == 0:
        steps = options.steps - options.first
        print(f"{options.steps} steps, {ticks} ticks, findings: {found}")
        for name in sorted(after):
            print(f"{name:20} {1000 * (after[name] - before.get(name, 0.0)) / steps:8.3f} ms a step")
        print(f"{'process':20} {1000 * process / steps:8.3f} ms a step")
        if options.profile:
            figures = pstats.Stats(profile)
            calls = figures.total_calls  # type: ignore[attr-defined]  # typeshed lacks it
            print(f"{calls / options.steps:.0f} calls a step")
            figures.sort_stats(options.sort).print_stats(options.profile)
    if dist.is_initialized():
        del model
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
