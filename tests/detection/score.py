"""Runs the fault corpus under ddpdebug and scores what is found; writes docs/detection.md.

    python tests/detection/score.py [--jobs 1] [--only sync205,clean] [--write docs/detection.md] [--folder DIR]
    python tests/detection/score.py --held-out [--reveal] [--jobs 1] [--write docs/detection.md]
    python tests/detection/score.py --record [--stale] [--only sync205]
    python tests/detection/score.py --recorded [--accept] [--jobs 1]
    python tests/detection/score.py --sample 40

Each script runs through `ddpdebug run` with default options and those that its head names (`options`), once with
FAULT=1 and once with FAULT=0 (its clean twin); healthy scripts run once. The ranks are forked from a process that has
loaded torch, which saves most of the time; `--launch` starts them as a user does.
A fault counts as found when a finding has one of the expected codes, an expected rank, an expected name and the
expected first step; a HLTH or RCP code must be one of the first two. A clean run fails when anything at `error` or
above is reported, or more than one warning.
The operation and its `file:line` are a promise beyond that: a finding without them is found, but not located.

`--tree` lets the few ranks of the scripts talk and be judged as very many do (decision 33).

`--record` keeps what the rules were given in each run that is right (`recorded_runs.py`), with `--stale` only of runs
that have no recording, or one of what the script was before. `--recorded` runs nothing: it judges the recordings by the
rules of today and scores what they find; with `--accept` what they find now is what they must find from then on.
`--sample` runs so many, always the same, and as many at most of those whose recording is missing or stale.

`--held-out` runs `tests/held_out` and prints totals by family, no script and no finding: who writes rules does not see
what they are scored with (CONTRIBUTING.md). `--reveal` prints them all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))
sys.path.append(str(Path(__file__).resolve().parent))
import recorded_runs
import zygote
from many_ranks import become_many

from ddpdebug.detectors.catalog import catalog
from ddpdebug.run_directory.reader import read_findings
from ddpdebug.schema.finding import Finding, Severity

_CORPUS = Path(__file__).resolve().parent.parent / "corpus"
_HELD_OUT = _CORPUS.with_name("held_out")
#: Where the score of what is held out begins and ends on the page that both scores are written to.
_BLOCK = ("<!-- held out -->\n", "<!-- end of held out -->\n")
_HEADER = re.compile(r"^# ([a-z_.]+): (.*)$")
_TIMEOUT = 120


@dataclass(frozen=True)
class Case:
    """A script of the corpus and what its head promises."""

    path: Path
    keys: dict[str, str]

    @property
    def codes(self) -> list[str]:
        """The accepted codes, the ideal one first."""
        text = self.keys.get("expect.codes", "none")
        return [] if text.strip() == "none" else [code.strip() for code in text.split(",")]

    @property
    def options(self) -> list[str]:
        """Options of `ddpdebug run` without which the script's fault is not seen."""
        return self.keys.get("options", "").split()


@dataclass
class Result:
    """What one run showed."""

    case: Case
    fault: bool
    findings: list[Finding]
    seconds: float
    problems: list[str] = field(default_factory=list)
    unlocated: list[str] = field(default_factory=list)
    recording: recorded_runs.Recording | None = None

    def judge(self) -> None:
        """Set what is wrong with the findings."""
        if self.fault and self.case.codes:
            self.problems, self.unlocated = judge_fault(self.case, self.findings)
        else:
            self.problems = judge_clean(self.findings)


def load(path: Path) -> Case:
    """Read a script's head."""
    keys: dict[str, str] = {}
    for line in path.read_text().splitlines():
        match = _HEADER.match(line)
        if match:
            keys[match[1]] = match[2]
        elif not line.startswith("#"):
            break
    return Case(path, keys)


def run(case: Case, *, fault: bool, launch: bool, record: bool = False) -> Result:
    """Run a case under ddpdebug and judge what it reported; `record` keeps what the rules were given."""
    scratch = Path(tempfile.mkdtemp(prefix="ddpdebug-score-"))
    started = time.monotonic()
    status, log = (_launched if launch else _forked)(case, scratch, {"FAULT": str(int(fault)), "OMP_NUM_THREADS": "1"})
    findings = list(read_findings(scratch / "run")) if (scratch / "run" / "findings.jsonl").exists() else []
    result = Result(case, fault, findings, time.monotonic() - started)
    result.judge()
    if status is None:
        result.problems.append("timed out")
    elif not (scratch / "run" / "run.json").exists():
        # a run that never began is no clean run, and no missed fault either
        result.problems = [f"did not run, exit status {status}: {log.strip()[:300] or 'nothing printed'}"]
    elif status != 0 and not fault:
        result.problems.append(f"ended with exit status {status}")
    result.problems += [line.strip() for line in log.splitlines() if "has switched itself off" in line][:2]
    if record and (scratch / "run" / "run.json").exists():
        result.recording = recorded_runs.record(scratch / "run", case.path, fault=fault, findings=findings)
    shutil.rmtree(scratch, ignore_errors=True)
    return result


def judged_again(case: Case, recording: recorded_runs.Recording) -> Result:
    """Judge a recorded run by the rules of today; one that they judge otherwise than its run keeps what they find."""
    started = time.monotonic()
    findings = recorded_runs.judge(recording)
    result = Result(case, recording.fault, findings, time.monotonic() - started)
    result.judge()
    if [*map(recorded_runs.decided, findings)] != [*map(recorded_runs.decided, recording.findings)]:
        result.recording = dataclasses.replace(recording, findings=findings)
    return result


def sample(jobs: list[tuple[Case, bool]], count: int) -> list[tuple[Case, bool]]:
    """Return the same runs each time: a fault and a clean one of each family, and others as their digests fall."""
    order = sorted(jobs, key=lambda job: hashlib.sha256(f"{job[0].path.stem} {job[1]}".encode()).digest())
    firsts = {(recorded_runs.family(case.path.stem), fault): (case, fault) for case, fault in reversed(order)}
    chosen = [*firsts.values(), *(job for job in order if job not in firsts.values())][:count]
    return [job for job in jobs if job in chosen]


def _launched(case: Case, scratch: Path, env: dict[str, str]) -> tuple[int | None, str]:
    """Return exit status (None: it took too long) and what was printed to stderr."""
    words = ["--nproc-per-node", case.keys["nproc"], "--out", str(scratch / "run"), "--metrics", "off", *case.options]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ddpdebug", "run", *words, str(case.path)],
            env={**os.environ, **env}, cwd=scratch, capture_output=True, text=True, timeout=_TIMEOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stderr


def _forked(case: Case, scratch: Path, env: dict[str, str]) -> tuple[int | None, str]:
    ranks = int(case.keys["nproc"])
    options = ["--out", str(scratch / "run"), "--metrics", "off", *case.options]
    job = {"script": str(case.path), "args": [], "ranks": ranks, "cwd": str(scratch), "timeout": _TIMEOUT}
    env["LOCAL_WORLD_SIZE"] = str(ranks)
    results = zygote.run({**job, "options": options, "env": env})
    statuses = [result["status"] for result in results]
    failed = None if None in statuses else next((status for status in statuses if status), 0)
    return failed, "".join(result["err"] for result in results)


def judge_clean(findings: list[Finding]) -> list[str]:
    """List what should not have been reported: an error, or more than one warning."""
    alarms = [f"false alarm {f.code} at step {f.step}" for f in findings if f.severity >= Severity.ERROR]
    warnings = [f.code for f in findings if f.severity is Severity.WARNING]
    return alarms + ([f"warnings {', '.join(warnings)}"] if len(warnings) > 1 else [])


def judge_fault(case: Case, findings: list[Finding]) -> tuple[list[str], list[str]]:
    """List what the best of the expected findings lacks to be right, and what it lacks to be located."""
    matching = [f for f in findings if f.code in case.codes]
    if not matching:
        return [f"missed: expected {case.codes[0]}, found {sorted({f.code for f in findings}) or 'nothing'}"], []
    if case.codes[0].startswith(("HLTH", "RCP")) and not any(f in matching for f in findings[:2]):
        return [f"only after {findings[0].code} and {findings[1].code}"], []
    ranked = sorted(matching, key=lambda f: case.codes.index(f.code))
    return min(((_lacks(case, f), _unlocated(case, f)) for f in ranked), key=lambda lists: [len(x) for x in lists])


def _lacks(case: Case, finding: Finding) -> list[str]:
    lacking: list[str] = []
    ranks = case.keys.get("expect.ranks", "any").strip()
    if ranks not in {"any", "all"} and {int(r) for r in ranks.split(",")} - set(finding.ranks):
        lacking.append(f"ranks {list(finding.ranks)} instead of {ranks}")
    subject = case.keys.get("expect.subject", "any").strip()
    if subject != "any" and not any(subject in name for name in finding.subject):
        lacking.append(f"subject {list(finding.subject[:2])} instead of {subject!r}")
    module = case.keys.get("expect.module", "any").strip()
    if module != "any" and not _names(module, [*finding.subject, json.dumps(finding.evidence)]):
        lacking.append(f"module {list(finding.subject[:2])} instead of {module!r}")
    step = case.keys.get("expect.step", "any").strip()
    slack = int(case.keys.get("expect.step_slack", "0"))
    if step not in {"any", "none"} and (finding.step is None or abs(finding.step - int(step)) > slack):
        lacking.append(f"step {finding.step} instead of {step}")
    phase = case.keys.get("expect.phase")
    if finding.code == "RANK101" and phase and finding.phase not in {p.strip() for p in phase.split(",")}:
        lacking.append(f"phase {finding.phase} instead of {phase}")
    if finding.code != case.codes[0] and case.keys.get("expect.strict"):
        lacking.append(f"code {finding.code} instead of {case.codes[0]}")
    return lacking


def _unlocated(case: Case, finding: Finding) -> list[str]:
    evidence = json.dumps(finding.evidence)
    lacking: list[str] = []
    op = case.keys.get("expect.op", "any").strip()
    if op != "any" and not _names(op, [evidence]):
        lacking.append(f"operation {op} not named")
    places = [place.strip() for place in case.keys.get("expect.location", "any").split(",")]
    shown = f"{finding.location} {evidence}"
    if places != ["any"] and not any(re.search(re.escape(place) + r"(?!\d)", shown) for place in places):
        lacking.append(f"location {finding.location} instead of {' or '.join(places)}")
    return lacking


def _names(word: str, texts: list[str]) -> bool:
    """Whether `word` stands in a text as a name or a part of one: `log` in `aten.log.default`, not in `logits`."""
    return any(re.search(rf"(?<![a-zA-Z])(?i:{re.escape(word)})(?![a-z0-9])", text) for text in texts)


@dataclass(frozen=True)
class Totals:
    """How many of some runs were right."""

    faults: int
    found: int
    ideal: int
    located: int
    cleans: int
    quiet: int

    @classmethod
    def of(cls, results: list[Result]) -> Totals:
        """Count the runs of faults, and apart from them those that have nothing to report."""
        faults = [r for r in results if r.fault and r.case.codes]
        cleans = [r for r in results if not (r.fault and r.case.codes)]
        found = [r for r in faults if not r.problems]
        return cls(
            faults=len(faults),
            found=len(found),
            ideal=sum(any(f.code == r.case.codes[0] for f in r.findings) for r in found),
            located=sum(not r.unlocated for r in found),
            cleans=len(cleans),
            quiet=sum(not r.problems for r in cleans),
        )

    def lines(self) -> list[str]:
        """Return the score as a list in Markdown."""
        located = f"**{self.located} of {self.found}**"
        return [
            f"- faults found: **{self.found} of {self.faults}** ({self.ideal} with the ideal code)",
            f"- of these, with the operation and line wherever the script names one: {located}",
            f"- clean twins and healthy scripts without a false alarm: **{self.quiet} of {self.cleans}**",
        ]


def report(results: list[Result], held_out: str = "") -> str:
    """Return the score as Markdown, with that of what is held out in it."""
    lines = [
        "# Detection score",
        "",
        "Written by `make detection`, which runs `tests/corpus/` with default options (`--validation-loss functions`",
        "for scripts that evaluate with functional losses). A fault is found when code, rank, name and first step are",
        "right, and a HLTH or RCP code is one of the first two; a run is clean with nothing at `error` or above and at",
        "most one warning.",
        "",
        *Totals.of(results).lines(),
        "",
        *held_out.splitlines(),
        "## Scripts of the corpus",
        "",
    ]
    rows = list[str]()
    for r in sorted(results, key=lambda r: (r.case.path.name, not r.fault)):
        codes = ", ".join(f"{f.code}@{f.step}" for f in r.findings) or "nothing"
        kind = "fault" if r.fault and r.case.codes else "clean"
        verdict, missing = "; ".join(r.problems) or "ok", "; ".join(r.unlocated)
        if r.problems or r.unlocated:
            rows.append(f"| {r.case.path.stem} | {kind} | {codes} | {verdict} | {missing} |")
    if rows:
        rows = [
            "Runs that were not right:",
            "",
            "| script | run | reported | verdict | not located |",
            "|---|---|---|---|---|",
            *rows,
        ]
    return "\n".join([*lines, *(rows or ["All runs were right."])]) + "\n"


def report_held_out(results: list[Result]) -> str:
    """Return the totals by family as a block for the page, without names."""
    families: dict[str, list[Result]] = {}
    for r in sorted(results, key=lambda r: (not r.case.codes, r.case.codes)):
        families.setdefault(re.split(r"\d", r.case.codes[0])[0] if r.case.codes else "healthy", []).append(r)
    lines = [
        "## Held out",
        "",
        "Written by `make held-out`, which runs `tests/held_out/` and counts in the same way. Authors of rules do not",
        "read these scripts: their score is what to expect of programs that the rules were not written with.",
        "",
        *Totals.of(results).lines(),
        "",
        "| family | faults | found | with the ideal code | located | clean runs | without a false alarm |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, of_it in families.items():
        t = Totals.of(of_it)
        lines.append(f"| {family} | {t.faults} | {t.found} | {t.ideal} | {t.located} | {t.cleans} | {t.quiet} |")
    begin, end = _BLOCK
    return begin + "\n".join(lines) + "\n\n" + end


def held_out_block(page: str) -> str:
    """Return the part of the page that `report_held_out` made, empty where there is none."""
    begin, end = _BLOCK
    _, found, after = page.partition(begin)
    return found + after.partition(end)[0] + end if found else ""


def _write(path: Path, results: list[Result], *, held_out: bool) -> None:
    """Write one of the two scores into the page and leave the other as it is."""
    path.parent.mkdir(exist_ok=True)
    page = path.read_text() if path.exists() else report([])
    kept = held_out_block(page)
    if not held_out:
        page = report(results, kept)
    else:
        before, scripts, after = page.replace(kept, "").partition("## Scripts of the corpus\n")
        page = before + report_held_out(results) + scripts + after
    path.write_text(page)


def _reported(results: list[Result]) -> dict[str, dict[str, object]]:
    return {
        f"{r.case.path.stem}{'' if r.fault or not r.case.codes else ', clean'}": {
            "findings": [[f.code, f.step, list(f.ranks), list(f.subject), f.location] for f in r.findings],
            "problems": [*r.problems, *r.unlocated],
        }
        for r in results
    }


def _job(job: tuple[Case, bool], *, launch: bool, record: bool) -> Result:
    return run(job[0], fault=job[1], launch=launch, record=record)


def _judged(job: tuple[Case, recorded_runs.Recording]) -> Result:
    return judged_again(*job)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="so many runs at the same time")
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--require", type=float, default=1.0, help="share of runs that must be right")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--held-out", action="store_true", help="run tests/held_out and print totals only")
    parser.add_argument("--reveal", action="store_true", help="print what is held out: not for who writes rules")
    parser.add_argument("--launch", action="store_true", help="start ranks as a user does")
    parser.add_argument("--json", type=Path, help="write what each run reported, for `make compat`")
    parser.add_argument("--tree", action="store_true", help="the ranks talk over the tree, as very many do")
    parser.add_argument("--record", action="store_true", help="keep the runs that are right")
    parser.add_argument("--stale", action="store_true", help="with --record: those without a recording of today")
    parser.add_argument("--recorded", action="store_true", help="judge what was recorded, run nothing")
    parser.add_argument("--accept", action="store_true", help="with --recorded: what is found now is right")
    parser.add_argument("--sample", type=int, default=0, help="run so many, and some without a recording of today")
    args = parser.parse_args()
    if (args.record or args.recorded or args.sample) and (args.held_out or args.folder or args.tree or args.write):
        parser.error("recordings are of tests/corpus")
    if args.held_out and args.json:
        parser.error("--json names scripts: it is not for what is held out")
    if args.held_out and args.only and not args.reveal:
        parser.error("totals of a few held-out scripts tell which they are: --only needs --reveal")
    if args.tree and (args.launch or args.write):
        parser.error("--tree is for ranks that are forked, and their score is not that of the page")
    if args.held_out and args.reveal:
        print("warning: who reads this writes no rules for it; a script that is used to mend one moves to tests/corpus")
    return args


def _live(args: argparse.Namespace, jobs: list[tuple[Case, bool]]) -> Iterator[Result]:
    """Run scripts, and yield each when it and those before it have ended."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
    zygote.preload()
    for module in ("ddpdebug.monitor.attach", "ddpdebug.commands.run"):
        importlib.import_module(module)
    catalog()  # the rules
    if args.tree:
        become_many()
    zygote.spare_the_collector()
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        judged = pool.map if args.jobs > 1 else map
        yield from judged(partial(_job, launch=args.launch, record=args.record), jobs)


def _from_recordings(args: argparse.Namespace, jobs: list[tuple[Case, recorded_runs.Recording]]) -> Iterator[Result]:
    """Judge recordings; what is found otherwise than before is said, or accepted."""
    catalog()
    changed = list[recorded_runs.Recording]()
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for result in pool.map(_judged, jobs, chunksize=8) if args.jobs > 1 else map(_judged, jobs):
            if result.recording is not None:
                changed.append(result.recording)
            yield result
    for one in changed:
        print(f"judged otherwise than in its run: {one.script}, {'fault' if one.fault else 'clean'}")
    if args.accept:
        recorded_runs.write(recorded_runs.FOLDER, changed)


def _kept(results: Iterable[Result]) -> Iterator[Result]:
    """Write recordings down whenever a family is through, so that little is lost where this is ended."""
    for _, family in groupby(results, key=lambda result: recorded_runs.family(result.case.path.stem)):
        new = list[recorded_runs.Recording]()
        try:
            for result in family:
                if result.recording is not None and not (result.problems or result.unlocated):
                    new.append(result.recording)
                yield result
        finally:
            recorded_runs.write(recorded_runs.FOLDER, new)


def _results(args: argparse.Namespace, cases: list[Case]) -> Iterator[Result]:
    """Yield the results that are asked for."""
    jobs = [(case, fault) for case in cases for fault in ((True, False) if case.codes else (False,))]
    if not (args.recorded or args.sample or args.stale):
        return _kept(_live(args, jobs)) if args.record else _live(args, jobs)
    known = {one.name: one for one in recorded_runs.read(recorded_runs.FOLDER, scripts=_CORPUS)}
    stale = [(case, fault) for case, fault in jobs if (case.path.stem, fault) not in known]
    stale += [(case, fault) for case, fault in jobs if (one := known.get((case.path.stem, fault))) and one.stale]
    if args.recorded:
        for case, fault in stale:
            one = known.get((case.path.stem, fault))
            why = one.stale if one else "not recorded"
            print(f"not judged: {case.path.stem}, {'fault' if fault else 'clean'}: {why}")
        again = [(case, known[case.path.stem, fault]) for case, fault in jobs if (case, fault) not in stale]
        return _from_recordings(args, again)
    if args.record:
        return _kept(_live(args, [job for job in jobs if job in stale]))
    chosen = sample(jobs, args.sample)
    stale = [job for job in stale if job not in chosen]
    if (left := len(stale) - args.sample) > 0:
        print(f"{left} runs without a recording of today are not run: make detection runs all", flush=True)
    more = sample(stale, args.sample)
    return _live(args, [job for job in jobs if job in chosen or job in more])


def main() -> int:
    """Score the corpus; exit 1 when less than `--require` of the runs are right."""
    args = _arguments()
    folder = args.folder or (_HELD_OUT if args.held_out else _CORPUS)
    named = args.reveal or not args.held_out
    wanted = tuple(part for part in args.only.split(",") if part)
    cases = [load(path) for path in sorted(folder.resolve().glob("*.py"))]
    cases = [case for case in cases if not wanted or case.path.name.startswith(wanted)]
    results: list[Result] = []
    for result in _results(args, cases):
        results.append(result)
        if not named:
            continue
        kind = "fault" if result.fault else "clean"
        codes = " ".join(f"{f.code}@{f.step}{list(f.ranks)}" for f in result.findings)
        verdict = "ok  " if not result.problems else "FAIL"
        name = result.case.path.stem
        words = "; ".join([*result.problems, *result.unlocated])
        if not args.recorded or words:
            print(f"{verdict} {kind} {name:48} {result.seconds:5.1f}s {codes} {words}", flush=True)
    print(*report_held_out(results).splitlines()[6:-2] if args.held_out else Totals.of(results).lines(), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(_reported(results)))
    if args.write:
        _write(args.write, results, held_out=args.held_out)
    failed = sum(bool(r.problems) for r in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return int(len(results) - failed < args.require * len(results))


if __name__ == "__main__":
    sys.exit(main())
