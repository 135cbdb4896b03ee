"""How the cost of watching grows: with the model from 1M to 100M parameters, with the world from 2 to 8 ranks.

    python benchmarks/scaling.py

For each size: time in ddpdebug's hooks on the training thread in a checked and in an unchecked step, as a share of the
whole step, and the bytes that a rank sends per step. On a machine with fewer cores than ranks the times of the larger
worlds are those of ranks that wait for each other; the bytes are exact.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from overhead import Model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.config.settings import Config
from ddpdebug.monitor.attach import install
from ddpdebug.schema.row import ROW_BYTES

#: name -> (width, depth)
SIZES = {"1M": (128, 4), "10M": (384, 5), "100M": (1024, 8)}
RUNS = (("1M", 2), ("10M", 2), ("100M", 2), ("1M", 4), ("1M", 8))


def rank_main(size: str, every_step: bool, steps: int) -> None:  # noqa: FBT001 - a private entry point
    """Train a few watched steps; rank 0 prints what they cost as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as scratch:
        config = Config(out=Path(scratch) / "run", metrics="off", quiet=True, every_step=every_step)
        monitor = install(config)
        if not every_step:  # measure what remains when nothing is due
            monitor.probes.recorder._due = lambda _optimizer, step: step == 0  # noqa: SLF001 - the benchmark's own schedule
        width, depth = SIZES[size]
        model = DistributedDataParallel(Model(width, depth))
        parameters = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        overhead, whole = [], []
        for _ in range(steps):
            tokens = torch.randint(0, 512, (1, 65))
            before, start = monitor.guard.seconds, time.perf_counter()
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            whole.append(time.perf_counter() - start)
            overhead.append(monitor.guard.seconds - before)
        exchange = monitor._exchange  # noqa: SLF001 - as above
        monitor.close()
        sent = 0 if exchange is None else exchange.gathered_bytes / dist.get_world_size() / steps
    if dist.get_rank() == 0:
        median = statistics.median(overhead[2:])
        step = statistics.median(whole[2:])
        print(json.dumps({"parameters": parameters, "ms": 1e3 * median, "step_ms": 1e3 * step, "bytes": sent}))
    del model
    gc.collect()
    dist.destroy_process_group()


def measure(size: str, world: int, *, every_step: bool, steps: int) -> dict[str, float]:
    """Run one configuration under torchrun."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), __file__]
    more = ["--rank", size, "--steps", str(steps), *(["--every-step"] if every_step else [])]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # noqa: S603 - our own words
        [sys.executable, *words, *more], env=env, capture_output=True, text=True, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if line is None:
        sys.exit(f"{size} on {world} ranks failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(line)  # torch may abort at interpreter exit, after the result
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--every-step", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank, args.every_step, args.steps)
        return
    print(f"row: {ROW_BYTES} bytes per rank and step, whatever the model")
    print("| parameters | ranks | checked step, ms in hooks | unchecked step, ms in hooks | bytes sent per step |")
    print("|---|---|---|---|---|")
    for size, world in RUNS:
        full = measure(size, world, every_step=True, steps=args.steps)
        light = measure(size, world, every_step=False, steps=args.steps)
        cells = (
            f"{full['parameters'] / 1e6:.1f}M",
            str(world),
            f"{full['ms']:.1f} of {full['step_ms']:.0f}",
            f"{light['ms']:.1f} of {light['step_ms']:.0f}",
            f"{full['bytes']:.0f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
