"""`check --record` and `check --golden`: the path of a run, kept and compared."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpdebug.ci.golden import TRAJECTORY, Course, compare, load, read_path, recording
from ddpdebug.ci.publish import Witness, judge_directory
from ddpdebug.ci.verdict import Verdict, Word
from ddpdebug.errors import UsageError
from ddpdebug.processes.request import Request
from ddpdebug.run_directory.reader import read_steps

#: Starts the ranks: (request, directory, run id, more environment).
Start = Callable[[Request, Path, str, Mapping[str, str]], Witness]


def record_path(request: Request, directory: Path, start: Start) -> Verdict:
    """Run the script twice as it is and once shaken, write the golden file, and return the verdict of the first run."""
    target = request.config.record
    assert target is not None
    verdict, first = _run(request, directory, start, "0")
    if verdict.exit_code != 0 or first is None:
        return _noted(verdict, f"{target.name} was not written: only a clean run with optimizer steps can be recorded")
    courses = [first]
    for number, (shaken, what) in enumerate((("0", "again"), ("1", "with rounding errors added"))):
        print(f"ddpdebug: record: running the script {what}", file=sys.stderr, flush=True)
        place = directory / "record" / str(number)
        place.mkdir(parents=True, exist_ok=True)
        _, course = _run(request, place, start, shaken)
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


def follow_path(request: Request, directory: Path, start: Start) -> Verdict:
    """Run the script and return its verdict, with where it leaves the recorded path."""
    golden = _golden(request)
    verdict, course = _run(request, directory, start, "0")
    if course is None:
        return verdict
    found = compare(golden, course, request.config.nproc_per_node or 1)
    word = Word.DEPARTED if found.what is not None and verdict.word in {Word.CLEAN, Word.UNCHECKED} else verdict.word
    return replace(verdict, golden=found, word=word)


def _golden(request: Request) -> dict[str, Any]:
    file = request.config.golden
    assert file is not None
    try:
        return load(file)
    except OSError as error:
        raise UsageError(f"--golden {str(file)!r} cannot be read: {error.strerror}; make one with --record") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--golden {str(file)!r}: {error}; make it again with --record") from None


def _run(request: Request, directory: Path, start: Start, shaken: str) -> tuple[Verdict, Course | None]:
    given = {key: value for key, value in request.given.items() if key not in {"record", "golden"}}
    each = replace(request, given={**given, "every_step": True})
    with tempfile.TemporaryDirectory(prefix="ddpdebug-") as scratch:
        file = Path(scratch) / "trajectory.jsonl"
        witness = start(each, directory, secrets.token_hex(3), {TRAJECTORY: f"{shaken} {file}"})
        verdict = judge_directory(
            directory, witness, request.config.fail_on, require_checks=request.config.require_checks
        )
        if verdict.exit_code > 1 or not file.exists():
            return verdict, None
        course = read_path(file, read_steps(directory))
    return verdict, course if course.moments else None


def _noted(verdict: Verdict, note: str) -> Verdict:
    return replace(verdict, notes=(*verdict.notes, note))
