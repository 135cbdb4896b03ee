"""What the memory samples of a step cost on the training thread: processor time of their three calls.

    python benchmarks/memory.py

On a GPU the allocator's statistics come on top; they are counters, and reading them waits for nothing.
"""

from __future__ import annotations

import statistics
import time

import torch

from ddpdebug.probes.memory import MemoryProbe


def main() -> None:
    """Measure and print the median."""
    torch.set_num_threads(1)
    probe, layer, inputs = MemoryProbe(), torch.nn.Linear(256, 256), torch.randn(4, 256)
    spent = []
    for step in range(3000):
        loss = layer(inputs).sum()
        started = time.thread_time()
        probe.inputs([inputs])
        probe.graph(loss)
        probe.end_step(step)
        spent.append(time.thread_time() - started)
        loss.backward()
    print(f"{1e6 * statistics.median(spent):.0f} microseconds a step")


if __name__ == "__main__":
    main()
