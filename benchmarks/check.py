"""What `ddpdebug check` adds to a short script's own time.

    python benchmarks/check.py [--rounds 5]

Starts a two-rank script of 20 steps by torchrun alone and by `ddpdebug check` in turn, and compares the medians.
Seconds are the point here: what people wait for in CI. They depend on the machine; the difference does so much less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(20):
    inputs = torch.randn(32, 64, generator=generator)
    labels = torch.randint(10, (32,), generator=generator)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
_RANKS = ["--nproc-per-node", "2"]


def seconds(words: list[str], folder: Path) -> float:
    """Run a command that must succeed; return the time that it took."""
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)  # noqa: S603 - our own words
    return time.perf_counter() - started


def main() -> None:
    """Measure in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "train.py").write_text(_SCRIPT)
        ways = {
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", *_RANKS, "train.py"],
            "ddpdebug check": [sys.executable, "-m", "ddpdebug", "check", *_RANKS, "train.py"],
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, words in ways.items():
                times[way].append(seconds(words, folder))
        for way, values in times.items():
            print(f"{way:16} {statistics.median(values):6.1f} s  ({min(values):.1f} to {max(values):.1f})")
        pairs = zip(times["ddpdebug check"], times["torchrun"], strict=True)
        print(f"{'check adds':16} {statistics.median(a - b for a, b in pairs):6.1f} s")


if __name__ == "__main__":
    main()
