"""Runs programs in the manner of public ones, healthy and with a fault each, and scores what ddpdebug says of them.

    python tests/programs/run.py [--only nanogpt,moco] [--jobs 1] [--write docs/programs.md]

A program is one file of `scripts/`. The first line of its docstring says what it is; the rest is TOML:

- `manner`: the public program that it is written after; or `packages`: what it needs and is skipped without
- `ranks`: how many are forked from a process that has loaded torch (1); `run = "alone"`: it starts its ranks itself
- `[[fault]]`: `name`; `old` and `new`, the change of the text; `codes`, of which one must be reported, the ideal one
  first; `ranks`, the culprits, and `where`, a text in the line that the finding must name, where there is one

Each runs plain and under `ddpdebug run` with default options, and so does each of its faults. Plain and attached must
end alike: exit, output (with the bits of parameters, optimizer, losses and generators) and files. Findings are judged
as those of the corpus are (`tests/detection/score.py`).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SCRIPTS = HERE / "scripts"
sys.path[:0] = [str(ROOT), *(str(HERE.parent / name) for name in ("detection", "harm", "support"))]

import pairs  # noqa: E402
from score import Case, judge_clean, judge_fault  # noqa: E402

from ddpdebug.run_directory.reader import read_findings  # noqa: E402
from ddpdebug.schema.finding import Finding, Severity  # noqa: E402

_KEYS = {"manner", "packages", "ranks", "run", "env", "fault"}
_FAULT_KEYS = {"name", "old", "new", "codes", "ranks", "where"}
_SECONDS = 300

Zygote = Callable[[list[dict[str, Any]]], list[list[dict[str, Any]]]]


@dataclass(frozen=True)
class Fault:
    """A change of a program's text, and what must be said of it."""

    name: str
    old: str
    new: str
    codes: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    where: str | None = None


@dataclass(frozen=True)
class Program:
    """One script, how it is run, and its faults."""

    path: Path
    title: str
    manner: str
    text: str
    faults: tuple[Fault, ...]
    ranks: int = 1
    how: str = "forked"
    packages: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]

    def changed(self, fault: Fault | None) -> str:
        """Return the text with the fault in it; lines of the docstring are left alone, so that their numbers stay."""
        if fault is None:
            return self.text
        head = self.text.index('"""', 3) + 3
        return self.text[:head] + self.text[head:].replace(fault.old, fault.new)


def read(path: Path) -> Program:
    """Read a program; raise ValueError that names the file where its head does not fit its text."""
    text = path.read_text("utf-8")
    title, _, rest = (ast.get_docstring(ast.parse(text), clean=False) or "").partition("\n")
    head = tomllib.loads(rest)
    faults = []
    for entry in head.get("fault", []):
        unknown = entry.keys() - _FAULT_KEYS
        fault = Fault(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items() if k in _FAULT_KEYS})
        count = text[text.index('"""', 3) :].count(fault.old)
        if unknown or count != 1:
            raise ValueError(f"{path.name}: {fault.name!r}: unknown keys {sorted(unknown)}, `old` stands {count} times")
        faults.append(fault)
    if unknown := head.keys() - _KEYS:
        raise ValueError(f"{path.name}: unknown keys {sorted(unknown)}")
    return Program(
        path, title, head.get("manner", ""), text, tuple(faults), head.get("ranks", 1), head.get("run", "forked"),
        tuple(head.get("packages", [])), head.get("env", {}),
    )  # fmt: skip


def programs(folder: Path = SCRIPTS) -> list[Program]:
    """Return all of them, by file name."""
    return [read(path) for path in sorted(folder.glob("[a-z]*.py"))]


@dataclass
class Outcome:
    """What the plain and the attached run of one text showed."""

    program: Program
    fault: Fault | None
    findings: list[Finding]
    differences: list[str]
    problems: list[str]
    unlocated: list[str]
    steps: int = 0
    status: str = ""

    @property
    def right(self) -> bool:
        return not self.problems

    @property
    def found(self) -> bool:
        """Return whether one of the codes was reported at all; ranks and order are judged in `problems`."""
        return self.fault is not None and any(f.code in self.fault.codes for f in self.findings)


def judge(
    program: Program, fault: Fault | None, findings: list[Finding], text: str, steps: int
) -> tuple[list[str], list[str]]:
    """List what is wrong with the findings, and what the right one lacks to be located."""
    if fault is None:
        return judge_clean(findings) + ([] if steps else ["no step was seen"]), []
    keys = {"expect.codes": ", ".join(fault.codes)}
    if fault.ranks:
        keys["expect.ranks"] = ", ".join(map(str, fault.ranks))
    if fault.where:
        line = text[: text.index(fault.where, text.index('"""', 3))].count("\n") + 1
        keys["expect.location"] = f"{program.path.name}:{line}"
    return judge_fault(Case(program.path, keys), findings)


def run(program: Program, fault: Fault | None, ask: Zygote) -> Outcome:
    """Run a program, or one of its faults, plain and attached."""
    folder = Path(tempfile.mkdtemp(prefix="ddpdebug-programs-"))
    try:
        script = folder / program.path.name
        script.write_text(text := program.changed(fault), "utf-8")
        report = (HERE.parent / "harm" / "situations" / "_report.py").read_text("utf-8")
        # what a program does not seed begins differently on each rank, as it does in processes that are not forked from
        # one, and alike in the plain and the attached run
        seeds = "own = 1000 + int(os.environ.get('RANK', '0'))\ntorch.default_generator.manual_seed(own)\n"
        seeds += "random.seed(own)\nnp.random.seed(own)\n"
        (folder / "_report.py").write_text(f"{report}\n\n{seeds}", "utf-8")
        options = {"run": program.how, "ranks": str(program.ranks)}
        if program.how == "alone":
            del options["ranks"]
        env = {"PYTHONPATH": str(folder), **program.env}
        situation = pairs.Situation(script, program.title, options)
        pair = pairs.Pair(situation, folder=str(folder))
        cwd = {mode: folder / mode for mode in ("plain", "attached")}
        for path in cwd.values():
            path.mkdir()
        words: dict[str, list[str] | None] = {"plain": None, "attached": ["--metrics", "off"]}
        if program.how == "alone":
            pair.plain, pair.attached = (pairs.run_fresh(situation, words[mode], cwd[mode]) for mode in cwd)
        else:
            env["LOCAL_WORLD_SIZE"] = str(program.ranks)
            job = {"script": str(script), "args": [], "ranks": program.ranks, "timeout": _SECONDS, "env": env}
            pair.plain, pair.attached = ask([{**job, "cwd": str(cwd[m]), "options": words[m]} for m in cwd])
        pair.files = pairs._files(cwd["plain"]), pairs._files(cwd["attached"])
        pair.steps = pairs._steps(cwd["attached"])
        runs = sorted(cwd["attached"].glob("ddpdebug-runs/*/findings.jsonl"))
        findings = [finding for file in runs for finding in read_findings(file.parent)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    problems, unlocated = judge(program, fault, findings, text, pair.steps)
    ends = {pairs.ending(result["status"]) for result in pair.attached}
    if fault is None and ends != {"exit 0"}:
        last = next((r["err"].strip().splitlines()[-1:] for r in pair.attached if r["status"]), [])
        problems.append(f"ended with {', '.join(sorted(ends))}: {' '.join(last)[:200]}")
    problems += [f"switched itself off: {name}" for name in pair.said]
    # a program that ends by an error: which rank notices first, and what it says of the other, differs in any two runs
    alike = fault is not None and any(result["status"] for result in pair.plain)
    differences = [d for d in pair.differences if "no step was watched" not in d and not (alike and "stderr" in d)]
    texts = [[text.replace(f"{folder}/", "") for text in texts] for texts in (differences, problems, unlocated)]
    return Outcome(program, fault, findings, *texts, pair.steps, ", ".join(sorted(ends)))


@contextmanager
def zygotes() -> Iterator[Zygote]:
    """Run jobs in processes that have loaded torch, one for each thread that asks."""
    own, started = threading.local(), []
    environment = pairs._environment(pairs.Situation(HERE, "", {}))

    def ask(jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        if not hasattr(own, "process"):
            command = [sys.executable, str(HERE.parent / "support" / "zygote.py"), "-"]
            pipe = subprocess.PIPE
            own.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
            started.append(own.process)
        own.process.stdin.write(json.dumps(jobs).encode() + b"\n")
        own.process.stdin.flush()
        answer: list[list[dict[str, Any]]] = json.loads(own.process.stdout.readline())
        return answer

    try:
        yield ask
    finally:
        for process in started:
            with process:  # closes both pipes and waits; it ends with its input
                process.stdin.close()


def _codes(findings: list[Finding], least: Severity = Severity.INFO) -> str:
    shown = [f for f in findings if f.severity >= least]
    return ", ".join(dict.fromkeys(f"{f.code} ({f.severity.label})" for f in shown)) or "nothing"


def figures(outcomes: list[Outcome]) -> dict[str, int]:
    """Count what the page begins with."""
    healthy, faults = ([o for o in outcomes if (o.fault is None) is kind] for kind in (True, False))
    said = [f for o in healthy for f in o.findings]
    return {
        "programs": len(healthy),
        "errors": sum(f.severity >= Severity.ERROR for f in said),
        "warnings": sum(f.severity is Severity.WARNING for f in said),
        "quiet": sum(o.right for o in healthy),
        "faults": len(faults),
        "found": sum(o.right for o in faults),
        "located": sum(o.right and not o.unlocated for o in faults if o.fault and o.fault.where),
        "places": sum(o.right for o in faults if o.fault and o.fault.where),
        "equal": sum(not o.differences for o in outcomes),
        "pairs": len(outcomes),
    }


def page(outcomes: list[Outcome], skipped: list[Program]) -> str:
    """Return the score as Markdown."""
    n = figures(outcomes)
    made = sum(bool(o.program.packages) for o in outcomes if o.fault is None)
    lines = [
        "# Public programs",
        "",
        "Written by `make programs`, which runs the programs of `tests/programs/scripts/`:",
        f"{made} on trainers of published packages (Transformers, PEFT, Accelerate, Lightning),",
        f"{n['programs'] - made} written anew in the manner of public ones, with small models and made-up data.",
        "Each runs plain and under `ddpdebug run` with default options, as it is and with faults that people make,",
        "chosen without a look at thresholds; a missed one stays.",
        "",
        "A healthy run is right with nothing at `error` or above and at most one warning; a fault is found when one of",
        "its codes is reported, and a HLTH or RCP code is one of the first two findings.",
        "",
        f"- findings at `error` or above in **{n['programs']}** healthy programs: **{n['errors']}** (aim: 0)",
        f"- warnings in them: **{n['warnings']}** (aim: at most {n['programs'] // 10}, one in ten runs)",
        f"- faults found: **{n['found']} of {n['faults']}** (aim: 90 %)",
        f"- of these, with the line wherever the program names one: **{n['located']} of {n['places']}**",
        f"- pairs of runs, plain and attached, that end alike, to the bit: **{n['equal']} of {n['pairs']}**",
        "",
        "## Healthy",
        "",
        "| program | in the manner of | warnings and above | result |",
        "| --- | --- | --- | --- |",
    ]
    for o in sorted((o for o in outcomes if o.fault is None), key=lambda o: o.program.path.name):
        loud = _codes(o.findings, Severity.WARNING).removeprefix("nothing")
        p = o.program
        manner = p.manner or f"program on {', '.join(p.packages)}"
        cells = [p.path.stem, manner, loud, "; ".join([*o.problems, _alike(o)])]
        lines.append("| " + " | ".join(pairs._cell(cell) for cell in cells) + " |")
    lines += [f"| {p.path.stem} | not run: {', '.join(p.missing)} is not installed | | |" for p in skipped]
    lines += [
        "",
        "## With a fault",
        "",
        "| program | fault | reported | result |",
        "| --- | --- | --- | --- |",
    ]
    for o in sorted((o for o in outcomes if o.fault is not None), key=lambda o: o.program.path.name):
        assert o.fault is not None
        seen = o.problems or o.unlocated or ["found"]
        told = [f for f in o.findings if f.severity >= Severity.WARNING or f.code in o.fault.codes]
        cells = [o.program.path.stem, o.fault.name, _codes(told), "; ".join([*seen, _alike(o)])]
        lines.append("| " + " | ".join(pairs._cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _alike(outcome: Outcome) -> str:
    return f"**differs**: {outcome.differences[0][:120]}" if outcome.differences else "the same"


def main(words: list[str] | None = None) -> int:
    """Run what the command line chooses; exit 1 where a figure misses its aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginnings of file names, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="so many programs at the same time")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--folder", type=Path, default=SCRIPTS)
    parser.add_argument("--verbose", action="store_true", help="show all findings and differences")
    args = parser.parse_args(words)
    wanted = tuple(part for part in args.only.split(",") if part)
    chosen = [p for p in programs(args.folder) if not wanted or p.path.name.startswith(wanted)]
    skipped = [p for p in chosen if p.missing]
    for program in skipped:
        print(f"skip {program.path.stem}: {', '.join(program.missing)} is not installed", flush=True)
    chosen.sort(key=lambda p: len(p.packages))  # the quick ones first
    tasks = [(p, fault) for p in chosen if not p.missing for fault in (None, *p.faults)]
    os.environ["OMP_NUM_THREADS"] = "1"
    outcomes = []
    with zygotes() as ask, ThreadPoolExecutor(args.jobs) as pool:
        for outcome in pool.map(lambda task: run(*task, ask), tasks):
            outcomes.append(outcome)
            _tell(outcome, verbose=args.verbose)
    n = figures(outcomes)
    print(json.dumps(n))
    if args.write:
        args.write.write_text(page(outcomes, skipped), "utf-8")
    missed = n["errors"] or n["warnings"] * 10 > n["programs"] or n["found"] < 0.9 * n["faults"]
    return int(bool(missed) or n["equal"] < n["pairs"])


def _tell(outcome: Outcome, *, verbose: bool) -> None:
    o = outcome
    word = "ok  " if o.right and not o.differences else "FAIL"
    kind = "fault" if o.fault else "clean"
    codes = " ".join(f"{f.code}@{f.step}{list(f.ranks)}" for f in o.findings)
    words = "; ".join([*o.problems, *o.unlocated, *o.differences])
    print(f"{word} {kind} {o.program.path.stem:32} {o.steps:4} steps {o.status:8} {codes} {words}", flush=True)
    if o.fault and (verbose or not o.right):
        print(f"       {o.fault.name}: expected {', '.join(o.fault.codes)}")
    if verbose or not o.right:
        for f in o.findings:
            evidence = json.dumps(f.evidence)[:300]
            print(f"       {f.code} {f.severity.label} {f.title} {f.location} {list(f.subject)[:4]} {evidence}")


if __name__ == "__main__":
    sys.exit(main())
