"""After how many seconds a hang is found, by kind of fault: median, 95th percentile, slowest, as a table in Markdown.

    python benchmarks/hangs.py [--rounds 5] [--loads 0,2] [--world 2] [--jobs 1] [KIND ...]

Runs `tests/progress/scripts/stops.py` with real ranks. The time is from the moment at which a rank stops to the finding
in `findings.jsonl`. A load of 2 is twice as many busy processes beside the job as the machine has cores. What else the
machine does is printed as well: figures are worth something where the load without the job is near to 0.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "progress"))  # before this file's folder
from jobs import Job, Result, run_all

#: Kinds, by what the issue of a hang is; the goal in seconds at the 95th percentile.
_GOALS = {
    "a rank left": (3, ("sigkill", "return", "raise", "os_exit", "uneven")),
    "different calls": (5, ("operation", "conditional", "barrier", "crossed", "new_group", "recv", "nan_continue")),
    "no sign of life": (8, ("sigstop", "gil", "regex", "pattern")),
    "nothing moves": (12, ("lock", "queue", "socket", "fifo", "stdin", "debugger", "process", "worker_blocked")),
}
_BUSY = "while True: sum(range(1000))"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the machine busy with so many processes."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(processes)]  # noqa: S603 - our own words
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def row(kind: str, goal: float, load: int, found: Sequence[Result]) -> str:
    """Return a line of the table."""
    seconds = sorted(result.latency for result in found if not math.isnan(result.latency))
    codes = sorted({line["code"] for result in found for line in result.findings[:1]}) or ["nothing"]
    if not seconds:
        return f"| {kind} | {load} | {', '.join(codes)} | 0 of {len(found)} | | | | {goal} |"
    late = seconds[math.ceil(0.95 * len(seconds)) - 1]
    figures = f"{statistics.median(seconds):.1f} | {late:.1f} | {seconds[-1]:.1f}"
    return f"| {kind} | {load} | {', '.join(codes)} | {len(seconds)} of {len(found)} | {figures} | {goal} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", default="0,2", help="busy processes for each core")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="so many at the same time, which is a load as well")
    given = parser.parse_args()
    goals = {kind: goal for goal, kinds in _GOALS.values() for kind in kinds}
    chosen = given.kinds or list(goals)
    one = Job(kind="", world=given.world, rank=given.world - 1)
    jobs = [replace(one, kind=kind) for kind in chosen for _ in range(given.rounds)]
    cores = os.cpu_count() or 1
    print(f"{given.world} ranks, {cores} cores, {given.rounds} rounds, load before: {os.getloadavg()[0]:.1f}")
    print("\n| fault | load for each core | code | found | median s | 95 % s | slowest s | goal s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for load in map(int, given.loads.split(",")):
        with busy(load * cores):
            time.sleep(2.0 if load else 0.0)
            found: dict[str, list[Result]] = {kind: [] for kind in chosen}
            for number, result in run_all(jobs, given.jobs):
                found[jobs[number].kind].append(result)
        for kind, results in found.items():
            print(row(kind, goals.get(kind, math.nan), load, results), flush=True)


if __name__ == "__main__":
    main()
