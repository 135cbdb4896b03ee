"""Runs `scripts/stops.py` with real ranks and says what was found and after how long: for the tests, and to measure.

    python tests/progress/hangs.py [--world N] [--rank R] [KIND ...]

prints a line for each kind: the code, the ranks and the line that were found, and the seconds from the moment at which
the rank stopped to the line in `findings.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from machine import free_port

SCRIPT = Path(__file__).resolve().parent / "scripts" / "stops.py"
_STEP = 5
_STOPS = re.compile(r"stops ([0-9.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run."""

    findings: list[dict[str, Any]]  # HANG501-503, oldest first
    others: list[str]  # codes of other findings
    latency: float  # seconds from the stop to the first hang in the file; NaN where there is none
    output: list[str] = field(default_factory=list)  # of the ranks
    statuses: list[int] = field(default_factory=list)

    @property
    def first(self) -> dict[str, Any]:
        """The first hang."""
        return self.findings[0] if self.findings else {}


def line_of(mark: str, kind: str) -> int:
    """Return the number of the marked line of a kind in the script."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines, 1) if f'KIND == "{kind}"' in line)
    return next(n for n, line in enumerate(lines, 1) if n >= start and line.endswith(f"# {mark}"))


def run(
    kind: str,
    rank: int = 1,
    *,
    world: int = 2,
    seconds: float = 30.0,
    limit: float = 60.0,
    whole: bool = False,
    folder: Path | None = None,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    script: Sequence[str] = (str(SCRIPT),),
) -> Result:
    """Run the script until a hang is found, or `whole` to its end, and at most `limit` seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        here = folder or Path(scratch)
        out, port = here / "out", free_port()
        command = [sys.executable, "-m", "ddpdebug", "run", "--metrics", "off", "--out", str(out), *options]
        command += [*script, kind, str(rank), str(_STEP), str(seconds)]
        ranks, logs = [], [here / f"{number}.log" for number in range(world)]
        for number, log in enumerate(logs):
            place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "MASTER_PORT": port}
            own = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **(environ or {})}
            own |= {name: str(value) for name, value in place.items()}
            with log.open("wb") as file:
                ranks.append(
                    subprocess.Popen(command, env=own, cwd=here, stdout=file, stderr=file, start_new_session=True)
                )
        found_at, until = float("nan"), time.monotonic() + limit
        while time.monotonic() < until and any(one.poll() is None for one in ranks):
            if math.isnan(found_at) and _hangs(out):
                found_at = time.monotonic()
                if not whole:
                    time.sleep(1.0)  # so that ranks that go on by themselves are seen to
                    break
            time.sleep(0.05)
        for one in ranks:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        output = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
        stops = [float(found[1]) for text in output if (found := _STOPS.search(text))]
        if math.isnan(found_at) and _hangs(out):
            found_at = time.monotonic()
        return Result(
            findings=_hangs(out),
            others=[line["code"] for line in _lines(out) if not line["code"].startswith("HANG")],
            latency=found_at - max(stops, default=float("nan")),
            output=output,
            statuses=[one.returncode for one in ranks],
        )


def _lines(out: Path) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in (out / "findings.jsonl", *sorted(out.glob("ranks/*/findings.jsonl"))):
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    known = json.loads(line)
                    found.setdefault(known["id"], known)
                    found[known["id"]] = known
    return list(found.values())


def _hangs(out: Path) -> list[dict[str, Any]]:
    return [line for line in _lines(out) if line["code"].startswith("HANG")]


def main() -> None:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()

    def one(kind: str) -> tuple[str, Result]:
        return kind, run(kind, given.rank, world=given.world, seconds=given.seconds, whole=given.whole)

    with ThreadPoolExecutor(given.jobs) as pool:
        for kind, result in pool.map(one, given.kinds):
            codes = " ".join(
                f"{f['code']} ranks {f['ranks']} {f['phase']} {Path(f['location'] or '-').name} step {f['step']}"
                + (f" ended {f['evidence']['ended_after_seconds']}" if "ended_after_seconds" in f["evidence"] else "")
                for f in result.findings
            )
            print(f"{kind:14} {result.latency:6.1f} s  {codes or '-'}  {result.statuses}", flush=True)


if __name__ == "__main__":
    main()
