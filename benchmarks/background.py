"""What ddpdebug's threads cost beside the training thread, in processor time for each step.

    OMP_NUM_THREADS=1 python benchmarks/background.py --first 1000
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/background.py --first 1000
    OMP_NUM_THREADS=1 python benchmarks/background.py --profile 40

A small multi-layer perceptron trains under `watch` with its defaults and writes a run directory. Printed is, for each
thread of ddpdebug's in rank 0, what it took between the first steps and the end by its own clock of processor time,
so that other work on the machine counts little. The first thousand steps are mostly checked, those after them are not.
`--pause` makes the steps longer by sleeping: several steps are taken at a time where they are short. `--profile N`
prints the N functions that take most of the time of the thread that judges, and how many calls it makes for each step;
a profiled thread takes several times as long.
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
from ddpdebug.monitor.monitor import Monitor


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


def settle(monitor: Monitor) -> int:
    """Wait until the rows that there are have been judged; return the number of ticks."""
    exchange = monitor._exchange  # noqa: SLF001 - a benchmark looks inside
    while exchange is not None and len(exchange._rows) >= BATCH_ROWS:  # noqa: SLF001 - likewise
        time.sleep(0.1)
    time.sleep(0.5)
    return 0 if exchange is None else exchange.ticks


def measure(options: argparse.Namespace, rank: int) -> None:
    """Train, and print what the threads took."""
    torch.manual_seed(rank)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out = Path(folder) / "run" if rank == 0 else None
        monitor = ddpdebug.watch(model, optimizer, out=out, every_step=options.every_step, quiet=True)
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
        ticks = settle(monitor)
        after, process = clocks(), time.process_time() - process
        monitor.close()
    if rank == 0:
        each = 1000 / (options.steps - options.first)
        print(f"{options.steps} steps, {ticks} ticks, findings: {[finding.code for finding in monitor.findings]}")
        for name in sorted(after):
            print(f"{name:20} {each * (after[name] - before.get(name, 0.0)):8.3f} ms a step")
        print(f"{'process':20} {each * process:8.3f} ms a step")


def main() -> None:
    """Read the options, measure, print the profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--first", type=int, default=100, help="steps that are not counted")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds slept in each step")
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--profile", type=int, default=0)
    parser.add_argument("--sort", default="tottime", choices=("tottime", "cumtime"))
    options = parser.parse_args()
    profile = cProfile.Profile(time.thread_time)
    if options.profile:
        Exchange._run = profiled(Exchange._run, profile)  # type: ignore[method-assign]  # noqa: SLF001 - likewise
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    measure(options, rank)
    if options.profile and rank == 0:
        figures = pstats.Stats(profile)
        print(f"{figures.total_calls / options.steps:.0f} calls a step")  # type: ignore[attr-defined]  # typeshed lacks it
        figures.sort_stats(options.sort).print_stats(options.profile)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
