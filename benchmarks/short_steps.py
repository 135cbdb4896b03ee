"""What steps of a fraction of a millisecond pay: the same script plain and under `ddpdebug run`, in turn.

    OMP_NUM_THREADS=1 python benchmarks/short_steps.py [--rounds 5] [--steps 5000] [--ranks 1]

A small MLP in a DDP. Of each run: the time of a step in the second half, in the median of the steps, by the wall and by
the processor time of the training thread; the processor time of all threads of rank 0 for the whole training; and the
wall time of the whole job, with the start of Python and torch. Printed is the ratio to the plain run of the same round,
in the median of the rounds with the quartiles; `plain again` is the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SCRIPT = """
import json, os, statistics, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x, y = torch.randn(8, 16), torch.randn(8, 16)
wall, thread, began = [], [], time.process_time()
for _ in range(int(sys.argv[1])):
    first, second = time.perf_counter(), time.thread_time()
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
    wall.append(time.perf_counter() - first)
    thread.append(time.thread_time() - second)
half = len(wall) // 2
found = {"step": statistics.median(wall[half:]), "training": statistics.median(thread[half:])}
found["processor"] = time.process_time() - began
if dist.get_rank() == 0:
    open(sys.argv[2], "w").write(json.dumps(found))
dist.destroy_process_group()
"""
_WAYS = ("plain", "plain again", "attached")


def run(folder: Path, attached: bool, steps: int, ranks: int) -> dict[str, float]:  # noqa: FBT001 - the two ways
    """Run the script once; return its times in seconds."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*launcher, *(["-m", "ddpdebug", "run", "--quiet"] if attached else []), "train.py", str(steps), "out.json"]
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)  # noqa: S603 - our own words
    whole = time.perf_counter() - started
    found: dict[str, float] = json.loads((folder / "out.json").read_text())
    return {**found, "whole job": whole}


def main() -> None:
    """Measure in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    times: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "train.py").write_text(_SCRIPT)
        for _ in range(args.rounds):
            for way in _WAYS:
                times[way].append(run(folder, way == "attached", args.steps, args.ranks))
    plain = {name: statistics.median(one[name] for one in times["plain"]) for name in times["plain"][0]}
    print("plain:", ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in plain.items()))
    for way in _WAYS[1:]:
        for name in plain:
            ratios = [one[name] / base[name] for one, base in zip(times[way], times["plain"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
            print(f"{way:12} {name:10} {middle:6.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
