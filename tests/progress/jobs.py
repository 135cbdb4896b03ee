"""Runs the scripts of `scripts/` with real ranks, many jobs side by side, and says which hangs were found, and when.

    python tests/progress/jobs.py [--world N] [--rank R] [--jobs N] [--whole] [--tree] [KIND ...]
    python tests/progress/jobs.py -    # takes a list of jobs as JSON, and prints a line for each as it is done

prints a line for each kind of stop: what was found, and the seconds from the moment at which the rank stopped to the
line in `findings.jsonl`. A job ends as soon as something is found, unless it is to run `whole`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))
import zygote

SCRIPTS = Path(__file__).resolve().parent / "scripts"
STOPS = SCRIPTS / "stops.py"
#: The step in which a rank stops.
STEP = 5
_STOPS_AT = re.compile(r"^stops ([0-9.]+)$", re.MULTILINE)
#: Seconds between two looks into the files, and for which a job goes on once a hang was found: another may follow.
_LOOK_SECONDS, _MORE_SECONDS = 0.05, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run of a script.

    Args:
        kind: what the script does.
        rank: that does it.
        seconds: for which it does it.
        step: in which it does it.
        whole: run to the end of the script instead of to the first hang.
        stays: ranks that do not end by themselves: the job is over once the others have.
        limit: seconds after which it is ended.
        options: of `ddpdebug run`.
        hosts: of each rank, "0,0,1", where they take each other for ranks of several.
        tree: the ranks talk and are judged as very many do.
        environ: further environment variables, (name, value).
        folder: of the job, which is kept then; its run directory is `out` in it.
    """

    kind: str
    rank: int = 1
    world: int = 2
    seconds: float = 600.0
    step: int = STEP
    whole: bool = False
    stays: tuple[int, ...] = ()
    limit: float = 300.0  # of a machine that does much else
    script: str = STOPS.name
    options: tuple[str, ...] = ()
    hosts: str = ""
    tree: bool = False
    environ: tuple[tuple[str, str], ...] = ()
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run."""

    findings: list[dict[str, Any]]  # HANG501-503, oldest first, each as it was told last
    others: list[str]  # codes of other findings
    latency: float  # seconds from the stop to the first hang in the file; NaN where there is none
    output: list[str] = field(default_factory=list)  # of the ranks
    statuses: list[int | None] = field(default_factory=list)  # None of a rank that was ended
    folder: str = ""  # of the run; gone where the job was not to keep it

    @property
    def first(self) -> dict[str, Any]:
        """The first hang."""
        return self.findings[0] if self.findings else {}


def line_of(mark: str, kind: str = "") -> int:
    """Return the number of a marked line in `stops.py`, of a kind or of the training loop."""
    lines = list(enumerate(STOPS.read_text(encoding="utf-8").splitlines(), 1))
    start = next((number for number, line in lines if kind and f'KIND == "{kind}"' in line), 0)
    return next(number for number, line in lines if number >= start and line.endswith(f"# {mark}"))


def run(job: Job) -> Result:
    """Run a job with ranks that are forked from this process, which has loaded torch."""
    if job.folder:
        Path(job.folder).mkdir(parents=True)
        return _run(job, Path(job.folder))
    scratch = Path(tempfile.mkdtemp(prefix="ddpdebug-hangs-"))  # no context manager: a rank's exit would remove it
    try:
        return _run(job, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(job: Job, scratch: Path) -> Result:
    out, seen = scratch / "out", _Seen()
    script, before = ("on_hosts.py", [job.hosts]) if job.hosts else (job.script, [])
    about = {
        "script": str(SCRIPTS / script),
        "args": [*before, job.kind, str(job.rank), str(job.step), str(job.seconds)],
        "ranks": job.world,
        "cwd": str(scratch),
        "timeout": job.limit,
        "stays": job.stays,
        "tree": job.tree,
        "env": {"OMP_NUM_THREADS": "1", **dict(job.environ)},
        "options": ["--metrics", "off", "--out", str(out), *job.options],
    }
    ranks = zygote.run(about, lambda: seen.look(out) and not job.whole)
    seen.look(out, last=True)
    output = [rank["out"] + rank["err"] for rank in ranks]
    stops = [float(number) for text in output for number in _STOPS_AT.findall(text)]
    return Result(
        findings=hangs_in(out),
        others=[line["code"] for line in _findings_in(out) if not line["code"].startswith("HANG")],
        latency=seen.found - max(stops, default=math.nan),
        output=output,
        statuses=[rank["status"] for rank in ranks],
        folder=str(out),
    )


class _Seen:
    """When a hang was in the files for the first time."""

    def __init__(self) -> None:
        self.found = math.nan
        self._looked = 0.0

    def look(self, out: Path, *, last: bool = False) -> bool:
        """Look, not too often; return whether one was there long enough."""
        now = time.monotonic()
        if math.isnan(self.found) and (last or now - self._looked >= _LOOK_SECONDS):
            self._looked = now
            if hangs_in(out):
                self.found = now
        return now - self.found >= _MORE_SECONDS


def _findings_in(out: Path) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in (out / "findings.jsonl", *sorted(out.glob("ranks/*/findings.jsonl"))):
        if file.exists():
            whole = file.read_text(encoding="utf-8").rpartition("\n")[0]
            found |= {line["id"]: line for line in map(json.loads, whole.splitlines())}
    return list(found.values())


def hangs_in(out: Path) -> list[dict[str, Any]]:
    """Return the hangs that a run directory tells of, each as it was told last."""
    return [line for line in _findings_in(out) if line["code"].startswith("HANG")]


def run_all(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[int, Result]]:
    """Run jobs side by side; yields each one's number and result as it is done, the longest begun first."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
    zygote.preload()
    for module in ("ddpdebug.monitor.attach", "ddpdebug.commands.run", "ddpdebug.detectors.catalog"):
        importlib.import_module(module)
    sys.modules["ddpdebug.detectors.catalog"].catalog()  # the rules
    zygote.spare_the_collector()
    order = sorted(range(len(jobs)), key=lambda number: (not jobs[number].whole, -jobs[number].world, number))
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("fork")) as pool:
        futures = {pool.submit(run, jobs[number]): number for number in order}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _job(**given: Any) -> Job:
    """Return a job as JSON has it, which knows no tuples."""
    pairs = tuple((name, value) for name, value in given.pop("environ", ()))
    return Job(environ=pairs, **{name: tuple(one) if isinstance(one, list) else one for name, one in given.items()})


def words(result: Result) -> str:
    """Say what was found, on a line."""
    told = []
    for line in result.findings:
        over = line["evidence"].get("ended_after_seconds")
        where = Path(line["location"] or "-").name
        told.append(
            f"{line['code']} ranks {line['ranks']} {line['phase']} {where} step {line['step']}"
            + (f" ended {over}" if over is not None else "")
        )
    return " | ".join(told) or "-"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--step", type=int, default=STEP)
    parser.add_argument("--script", default=STOPS.name)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--tree", action="store_true")
    given = parser.parse_args()
    if given.kinds == ["-"]:
        jobs = [_job(**given) for given in json.load(sys.stdin)]
        for number, result in run_all(jobs, given.jobs):
            print(json.dumps([number, asdict(result)]), flush=True)
        return
    common = {name: getattr(given, name) for name in ("rank", "world", "seconds", "step", "whole", "script", "tree")}
    jobs = [Job(kind=kind, **common) for kind in given.kinds]
    for number, result in run_all(jobs, given.jobs):
        print(f"{jobs[number].kind:16} {result.latency:6.1f} s  {words(result)}  {result.statuses}", flush=True)


if __name__ == "__main__":
    main()
