"""What attaching costs in memory: the peak of a job plain and attached, and the time that the samples of a step take.

    python benchmarks/memory.py [--rounds 3]

The peak is that of fresh processes: the resident set of the host (`VmHWM`), and on a GPU the allocator's largest sum of
what was allocated. Of several rounds the median counts. Allocations from 256 KiB up go back to the system at once, so
that the C library's own reserve, which differs from run to run, is not part of it. The time is processor time of the
three calls on the training thread; on a GPU the allocator's statistics come on top, which are counters.
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

import torch
from torch import nn

_M_MMAP_BYTES = 1 << 18
_MIB = 1 << 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", choices=sorted(_JOBS))
    args = parser.parse_args()
    if args.job:
        print(json.dumps(_job(args.job)))
        return
    print(f"{'job':<44} {'where':<8} {'plain':>10} {'attached':>10} {'more':>9} {'ratio':>7}")
    for name, (text, *_) in _JOBS.items():
        runs: dict[bool, list[dict[str, int]]] = {False: [], True: []}
        for _ in range(args.rounds):
            for attached, found in runs.items():
                found.append(_measured(name, attached=attached))
        for where in runs[False][0]:
            plain, watched = (statistics.median(run[where] for run in runs[attached]) for attached in (False, True))
            row = f"{plain / _MIB:>6.0f} MiB {watched / _MIB:>6.0f} MiB {(watched - plain) / _MIB:>5.1f} MiB"
            print(f"{text:<44} {where:<8} {row} {watched / plain:>7.3f}", flush=True)
    print(f"{_sample_seconds() * 1e6:.0f} microseconds a step")


# --- peaks ------------------------------------------------------------------------------------------------------------


def _measured(name: str, *, attached: bool) -> dict[str, int]:
    """Run a job in a fresh process; return its peaks in bytes by place."""
    with tempfile.TemporaryDirectory() as folder:
        watch = ["-m", "ddpdebug", "run", "--quiet", "--metrics=off", f"--out={folder}/run"] if attached else []
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(_M_MMAP_BYTES)}
        command = [sys.executable, *watch, str(Path(__file__).resolve()), "--job", name]
        done = subprocess.run(command, env=env, cwd=folder, stdout=subprocess.PIPE, check=True, text=True)  # noqa: S603 - ourselves
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _job(name: str) -> dict[str, int]:
    """Train; return the peaks of this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, width, layers, samples, accumulated, steps = _JOBS[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU()))).to(device)
    model.append(nn.Linear(width, 8, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        for _ in range(accumulated):
            x = torch.rand(samples, width).to(device)
            loss = model(x).square().mean() / accumulated
            loss.backward()
            del x, loss
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = {"host": next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))}
    if device.type == "cuda":
        found["device"] = torch.cuda.max_memory_allocated()
    return found


#: name -> what it is, width, layers, samples of a micro-batch, micro-batches of a step, steps
_JOBS = {
    "small": ("0.5M parameters, batches of 0.1 MiB", 256, 8, 128, 1, 30),
    "usual": ("5M parameters, batches of 0.25 MiB", 1024, 5, 64, 1, 6),
    "large": ("25M parameters, batches of 0.1 MiB", 2048, 6, 16, 1, 4),
    "accumulation": ("520 parameters, 8 micro-batches of 40 MiB", 64, 0, 163840, 8, 3),
}


# --- time -------------------------------------------------------------------------------------------------------------


def _sample_seconds() -> float:
    """Return the median processor time that the memory samples of a step take."""
    from ddpdebug.probes.memory import MemoryProbe  # noqa: PLC0415 - the plain jobs are without

    torch.set_num_threads(1)
    probe, layer, inputs = MemoryProbe(), nn.Linear(256, 256), torch.randn(4, 256)
    spent = []
    for step in range(3000):
        loss = layer(inputs).sum()
        started = time.thread_time()
        probe.inputs([inputs])
        probe.graph(loss)
        probe.end_step(step)
        spent.append(time.thread_time() - started)
        loss.backward()
    return statistics.median(spent)


if __name__ == "__main__":
    main()
