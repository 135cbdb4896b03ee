"""What the note of a collective costs: blocks of calls with it and without it in turn, alone and beside busy processes.

    python benchmarks/notes.py [--rounds 200] [--busy 4]

Gloo's group of one rank, so that a call is short and the note a large share of it. Such a call hands its work to a
thread of gloo's: it takes 12 microseconds where that is still awake and 70 where it has to be woken, so that the mean
or the median of many calls says how often it slept. Compared are the medians of two neighbouring blocks of 30 calls;
printed are the quartiles of their differences, in microseconds. Beside it, as a measure of the noise: what a busy wait
adds that is as long as a note, in the note's place, and what nothing adds.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

from ddpdebug import torch_internals as internals
from ddpdebug.disk import Disk
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.collective_notes import CollectiveNotes
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus
from ddpdebug.progress.black_box import BlackBox

_CALLS = 30


def spin() -> None:
    """Compute until the end."""
    while True:
        sum(range(10_000))


def alone(call: Callable[[], object]) -> float:
    """Return the microseconds of a call among many, at best."""
    times = []
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(200):
            call()
        times.append((time.perf_counter() - began) / 200 * 1e6)
    return min(times)


def typical(call: Callable[[], object], pause: float) -> float:
    """Return the median microseconds of a block of calls, each after a pause."""
    times = []
    for _ in range(_CALLS):
        wait(pause)
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def wait(microseconds: float) -> None:
    """Spend so long, without sleep."""
    until = time.perf_counter() + microseconds * 1e-6
    while time.perf_counter() < until:
        pass


def codes_of(function: FunctionType, box: BlackBox, tensor: torch.Tensor) -> tuple[dict[str, CodeType], float]:
    """Return the code of a function with and without what is compared, and how long a note takes alone."""
    plain = function.__code__
    guard = Guard(lambda part, message: None)
    notes = CollectiveNotes(Bus(guard), StepState(world=2), guard)
    notes.write_to(box.note)
    looks: list[Callable[..., None]] = []
    place = internals.look_at_collectives

    def kept(look: Callable[..., None]) -> Callable[[], None]:
        looks.append(look)
        return place(look)

    entries_of(guard).in_code("probe:collectives", "", kept, notes.issued)
    noted = function.__code__
    function.__code__ = plain
    took = alone(lambda: looks[0](function.__name__, tensor, None, None, None))

    def waited(*_: Any) -> None:
        wait(took)

    internals.look_at_collectives(waited)
    codes = {"with its note": noted, "with a busy wait as long": function.__code__, "as it is, once more": plain}
    function.__code__ = plain
    return codes, took


def measure(rounds: int, words: str) -> None:
    """Print how long a note takes, and what it adds to a call that follows another at once, and after a pause."""
    tensor, function = torch.ones(4, 8), inspect.unwrap(dist.all_reduce)
    assert isinstance(function, FunctionType)
    plain = function.__code__
    with tempfile.TemporaryDirectory() as folder:
        box = BlackBox(Path(folder) / "black_box", Disk())
        codes, took = codes_of(function, box, tensor)
        ring = alone(lambda: box.note("all_reduce\t0\t1234\t\t100\t101\ttrain.py:41\tfloat32 [4, 8]"))
        print(f"{words}: a note takes {took:.1f} us, of which its write into the ring {ring:.1f}", flush=True)
        for pause in (0.0, 200.0):
            times: dict[str, list[float]] = {name: [] for name in ("as it is", *codes)}
            for _ in range(rounds):
                for name, code in (("as it is", plain), *codes.items()):
                    function.__code__ = code
                    dist.all_reduce(tensor)  # the interpreter adapts to other code
                    times[name].append(typical(lambda: dist.all_reduce(tensor), pause))
            function.__code__ = plain
            print(f"{words}: all_reduce every {pause:.0f} us takes {statistics.median(times['as it is']):.1f} us")
            for name in codes:
                added = [one - other for one, other in zip(times[name], times["as it is"], strict=True)]
                low, middle, high = statistics.quantiles(added, n=4)
                print(f"{words}:   {name:25} {middle:+6.1f} us ({low:+.1f} .. {high:+.1f})", flush=True)
        box.close()


def main() -> None:
    """Measure quiet and busy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--busy", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("load", *(f"{load:.1f}" for load in os.getloadavg()))
    measure(given.rounds, "quiet")
    others = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(given.busy)]
    for other in others:
        other.start()
    measure(given.rounds, f"beside {given.busy} busy processes")
    for other in others:
        other.terminate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
