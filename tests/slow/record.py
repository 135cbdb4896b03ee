"""Records jobs beside busy loops: the files in `recorded/`.

    python tests/slow/record.py [NAME ...] [--folder tests/slow/recorded]

It starts the loops by itself, as many as the name's row says, and ends them again. What the machine does besides is
in the recording too: each one is made once and kept.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
import recordings

from ddpdebug.run_directory.reader import read_steps


@dataclass(frozen=True)
class Recording:
    """A job to record.

    Args:
        busy: loops beside it, on each core.
        job: arguments of `job.py`.
        code: what is to be found, of `rank` and in `phase`; None for a healthy job.
    """

    world: int
    busy: int
    job: str
    code: str | None = None
    rank: int | None = None
    phase: str | None = None


RECORDINGS = {
    "healthy_busy": Recording(4, 2, "--steps 400"),
    "healthy_quiet": Recording(4, 0, "--steps 300"),
    "healthy_two_ranks_busy": Recording(2, 2, "--steps 400"),
    "healthy_cyclic_lengths": Recording(4, 2, "--steps 300 --lengths cyclic"),
    "healthy_lengths_in_turn": Recording(4, 1, "--steps 300 --lengths turns"),
    "healthy_evaluation_on_rank_0": Recording(4, 2, "--steps 300 --evaluate-every 40"),
    "healthy_two_ranks_evaluation": Recording(2, 2, "--steps 400 --evaluate-every 40"),
    "healthy_short_steps": Recording(2, 1, "--steps 2500 --width 64 --batch 64"),  # kept: 520 steps around a busy spell
    "unequal_work": Recording(4, 1, "--steps 220 --lengths unequal", "SLOW601", 2, "work"),
    "slow_data": Recording(4, 2, "--steps 220 --where data --share 0.3", "SLOW601", 2, "data"),
    "slow_forward": Recording(4, 2, "--steps 220 --where forward --share 0.3", "SLOW601", 2, "forward"),
    "slow_backward": Recording(4, 2, "--steps 220 --where backward --share 0.3", "SLOW601", 2, "backward"),
    "slow_optimizer": Recording(4, 2, "--steps 220 --where optimizer --share 0.3", "SLOW601", 2, "optimizer"),
    "slow_forward_of_two_ranks": Recording(
        2, 2, "--steps 220 --where forward --share 0.3 --rank 1", "SLOW601", 1, "forward"
    ),
    "slow_a_little": Recording(4, 1, "--steps 300 --where backward --share 0.2", "SLOW601", 2, "backward"),
    "pauses_of_rank_0": Recording(
        4, 1, "--steps 300 --where other --share 4 --every 16 --rank 0", "SLOW601", 0, "pauses"
    ),
    "slower_forward_from_260": Recording(
        4, 1, "--steps 460 --where forward --share 0.6 --rank -1 --from-step 260", "SLOW603", None, "forward"
    ),
    "waits_for_data": Recording(4, 1, "--steps 220 --where data --share 0.6 --rank -1", "SLOW602", None, "data"),
}


def record(name: str, about: Recording, folder: Path) -> Path:
    """Run a job beside its loops and keep its steps; return the file."""
    job = Path(__file__).with_name("job.py")
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(about.busy * os.cpu_count())]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "run"
            words = ["--nproc-per-node", str(about.world), "--out", str(out), "--metrics", "off"]
            done = subprocess.run(
                [sys.executable, "-m", "ddpdebug", "run", *words, str(job), *about.job.split()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            told = {key: float(value) for key, value in re.findall(r"(\w+)=([0-9.]+)", done.stdout)}
            keys = ("code", "rank", "phase", "busy", "job")
            kept = {key: getattr(about, key) for key in keys} | told | {"load": round(os.getloadavg()[0])}
            path = folder / f"{name}.json.xz"
            recordings.write(path, kept, read_steps(out))
            print(f"{name}: {path.stat().st_size} bytes, {kept}", flush=True)
            return path
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Record what is named, or everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*RECORDINGS, []], metavar="NAME")
    parser.add_argument("--folder", type=Path, default=recordings.FOLDER)
    args = parser.parse_args()
    for name in args.names or RECORDINGS:
        record(name, RECORDINGS[name], args.folder)


if __name__ == "__main__":
    main()
