"""Golden runs and self-tests of `check`: `--record`, `--golden`, `--self-test`, each several runs of the script."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpdebug.ci.golden import TRAJECTORY, Course, compare, load, read_path, recording
from ddpdebug.ci.golden_facts import hold_to
from ddpdebug.ci.publish import Witness, judge_directory
from ddpdebug.ci.selftest import FAULT, FAULTS, STEPS, Fault, Proof, prove
from ddpdebug.ci.verdict import Verdict, Word
from ddpdebug.disk import Disk, mode_of
from ddpdebug.errors import UsageError
from ddpdebug.facts.comparison import facts_of
from ddpdebug.facts.fact import Facts
from ddpdebug.printing import say
from ddpdebug.processes.launch import Request
from ddpdebug.run_directory.reader import read_findings, read_ignored_findings, read_steps

#: Starts the ranks: (request, directory, run id, more environment).
Start = Callable[[Request, Path, str, Mapping[str, str]], Witness]
_QUIET = {"quiet": True, "metrics": "off", "every_step": True, "bundle_limit": 0, "steps": STEPS}


# --- the path of a run, kept and compared: `--record` and `--golden` --------------------------------------------------


def record_path(request: Request, directory: Path, start: Start) -> Verdict:
    """Run the script twice as it is and once shaken, write the golden file, and return the verdict of the first run."""
    target = request.config.record
    assert target is not None
    verdict, first = _follow(request, directory, start, "0")
    if verdict.exit_code != 0 or first is None:
        return _noted(verdict, f"{target.name} was not written: only a clean run with optimizer steps can be recorded")
    courses = [first]
    for number, (shaken, what) in enumerate((("0", "again"), ("1", "with rounding errors added"))):
        say(f"ddpdebug: record: running the script {what}\n")
        place = directory / "record" / str(number)
        place.mkdir(parents=True, exist_ok=True)
        _, course = _follow(request, place, start, shaken)
        if course is None:
            return _noted(verdict, f"{target.name} was not written: the script failed when it was run {what}")
        courses.append(course)
    content = recording(courses[0], courses[1], courses[2], request.config.nproc_per_node or 1)
    try:
        target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--record {str(target)!r} cannot be written: {error.strerror}") from None
    how = "bit by bit" if content["exact"] else "within tolerances only: two runs of the script were not equal"
    return _noted(verdict, f"{len(first.moments)} steps recorded in {target.name}; they can be compared {how}")


Golden = Facts | dict[str, Any]


def golden_of(file: Path) -> Golden:
    """Read what `--golden` names: a run directory or a file of facts, or a path that `--record` wrote.

    Raises:
        UsageError: it is none of these.
    """
    if file.is_dir() or _has_facts(file):
        return facts_of(file)
    try:
        return load(file)
    except OSError as error:
        raise UsageError(f"--golden {str(file)!r} cannot be read: {error.strerror}; make one with --record") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--golden {str(file)!r}: {error}; make it again with --record") from None


def _has_facts(file: Path) -> bool:
    """Tell whether a file begins as one of facts does, and not as one that `--record` wrote."""
    try:
        with file.open("rb") as opened:
            return b'"facts": [' in opened.read(200)
    except OSError:
        return False


def follow(request: Request, directory: Path, golden: Golden, start: Start) -> Verdict:
    """Run the script and return its verdict, with what does not hold of a good run, or where it leaves a path."""
    if isinstance(golden, Facts):
        return _hold(request, directory, golden, start)
    verdict, course = _follow(request, directory, start, "0")
    if course is None:
        return verdict
    found = compare(golden, course, request.config.nproc_per_node or 1)
    word = Word.DEPARTED if found.what is not None and verdict.word in {Word.CLEAN, Word.UNCHECKED} else verdict.word
    return replace(verdict, golden=found, word=word)


def _hold(request: Request, directory: Path, golden: Facts, start: Start) -> Verdict:
    given = {key: value for key, value in request.given.items() if key != "golden"}
    witness = start(replace(request, given=given), directory, secrets.token_hex(3), {})
    note = hold_to(golden, directory, Disk(mode_of(request.config.file_mode)))
    config = request.config
    verdict = judge_directory(directory, witness, config.fail_on, require_checks=config.require_checks)
    return _noted(verdict, note) if note else verdict


def _follow(request: Request, directory: Path, start: Start, shaken: str) -> tuple[Verdict, Course | None]:
    given = {key: value for key, value in request.given.items() if key not in {"record", "golden"}}
    each = replace(request, given={**given, "every_step": True})
    with tempfile.TemporaryDirectory(prefix="ddpdebug-") as scratch:
        file = Path(scratch) / "trajectory.jsonl"
        verdict = _run(each, directory, start, {TRAJECTORY: f"{shaken} {file}"})
        if verdict.exit_code > 1 or not file.exists():
            return verdict, None
        course = read_path(file, read_steps(directory))
    return verdict, course if course.moments else None


def _noted(verdict: Verdict, note: str) -> Verdict:
    return replace(verdict, notes=(*verdict.notes, note))


# --- the script with known faults in it, one short run each: `--self-test` --------------------------------------------


def prove_detectors(request: Request, directory: Path, start: Start) -> Verdict:
    """Run the script healthy, then with each fault; return the verdict of the healthy run with the proofs."""
    if (request.config.nproc_per_node or 1) < 2:
        raise UsageError("--self-test compares ranks; give --nproc-per-node 2 or more")
    given = {**request.given, **_QUIET}
    given.pop("self_test", None)
    short = replace(request, given=given, config=replace(request.config, steps=STEPS, self_test=False))
    with tempfile.TemporaryDirectory(prefix="ddpdebug-") as scratch:
        verdict = _run(short, directory, start, {})
        if verdict.word not in {Word.CLEAN, Word.UNCHECKED, Word.FINDINGS}:
            return _noted(verdict, "the script does not run as it is: nothing was proved")
        healthy = frozenset(finding.code for finding in (*verdict.failing, *verdict.others))
        proofs = tuple(_prove(short, fault, healthy, directory, start, Path(scratch)) for fault in FAULTS)
    missed = verdict.word in {Word.CLEAN, Word.UNCHECKED} and not all(proof.verified for proof in proofs)
    return replace(verdict, proofs=proofs, word=Word.MISSED if missed else verdict.word)


def _prove(
    request: Request, fault: Fault, healthy: frozenset[str], directory: Path, start: Start, scratch: Path
) -> Proof:
    say(f"ddpdebug: self-test: {fault.meaning}\n")
    folder = scratch / fault.name
    folder.mkdir()
    place = directory / "self-test" / fault.name
    Disk(mode_of(request.config.file_mode)).make_directory(place, below=directory)
    verdict = _run(request, place, start, {FAULT: f"{fault.name} {folder}"})
    note = "" if verdict.exit_code < 2 else f"its run ended as {verdict.word.value}"
    return prove(fault, [*read_findings(place), *read_ignored_findings(place)], healthy, note)


def _run(request: Request, directory: Path, start: Start, environ: Mapping[str, str]) -> Verdict:
    witness = start(request, directory, secrets.token_hex(3), environ)
    return judge_directory(directory, witness, request.config.fail_on, require_checks=request.config.require_checks)
