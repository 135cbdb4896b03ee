"""What the note of a collective costs: calls with it and without it in turn, alone and beside processes that compute.

    python benchmarks/notes.py [--rounds 400] [--busy 4]

Gloo's group of one rank, so that a call is short and the note a large share of it. Of each round of 50 calls the time
of one; printed are the least and the median of the rounds, in microseconds, and what the ring alone takes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ddpdebug.disk import Disk
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.collective_notes import CollectiveNotes
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus
from ddpdebug.progress.black_box import BlackBox

_CALLS = 50


def spin() -> None:
    """Compute until the end."""
    while True:
        sum(range(10_000))


def timed(call: Callable[[], object]) -> float:
    """Return the microseconds of one call, of so many."""
    began = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter() - began) / _CALLS * 1e6


def measure(rounds: int, words: str) -> None:
    """Print a line for the calls and one for the ring."""
    tensor = torch.ones(4, 8)
    plain, noted, ring = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        box = BlackBox(Path(folder) / "black_box", Disk())
        text = "all_reduce\t0\t1234\t\t100\t101\ttrain.py:41\tfloat32 [4, 8]"
        for _ in range(rounds):
            plain.append(timed(lambda: dist.all_reduce(tensor)))
            guard = Guard(lambda part, message: None)
            notes = CollectiveNotes(Bus(guard), StepState(world=2), guard)
            notes.write_to(box.note)
            notes.install()
            dist.all_reduce(tensor)  # what is looked up once
            noted.append(timed(lambda: dist.all_reduce(tensor)))
            entries_of(guard).close()
            ring.append(timed(lambda: box.note(text)))
        box.close()
    for name, values in (("all_reduce", plain), ("all_reduce with its note", noted), ("the ring alone", ring)):
        print(f"{words:6} {name:25} least {min(values):6.1f} us, median {statistics.median(values):6.1f} us")
    print(f"{words:6} the note adds {statistics.median(noted) - statistics.median(plain):.1f} us in the median")


def main() -> None:
    """Measure quiet and busy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--busy", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    measure(given.rounds, "quiet")
    others = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(given.busy)]
    for other in others:
        other.start()
    measure(given.rounds, "busy")
    for other in others:
        other.terminate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
