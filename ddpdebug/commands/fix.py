"""`ddpdebug fix`: source changes that cure findings, as diffs."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from ddpdebug.ci.checked import checked
from ddpdebug.commands._progress import progress
from ddpdebug.cures.cures import CURES, ELSEWHERE, cure
from ddpdebug.cures.source import CannotError, Source
from ddpdebug.errors import UsageError
from ddpdebug.redaction import HIDDEN
from ddpdebug.run_directory.reader import read_findings, read_outcomes, read_run
from ddpdebug.schema.finding import Finding
from ddpdebug.sinks.words import clean, counted

_TEXT = """Print the change of the source that ends what was found in the run in RUN_DIR, as a diff for `git apply`.

For some codes only, where the fault has one mechanical end and the source one place for it. Nothing is changed. A file
that is newer than the run is refused: the finding's line may be another one by now.

With --prove the script is checked twice as `ddpdebug check` does, once as a copy and once as a changed copy: cured is
what is found in the first and not in the second. It runs in this directory and writes what it writes.
"""
_LOCATION = re.compile(r"(?P<file>.+):(?P<line>[0-9]{1,9})")
_MAX_FILES, _MOST_STEPS = 5000, 200
_FAILED = frozenset({"script failed", "hang", "lost rank", "damaged"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Diff:
    """A change that was found."""

    finding: Finding
    file: Path
    source: Source
    about: str

    @property
    def name(self) -> str:
        """The file as it is called from here."""
        here = Path.cwd()
        return self.file.relative_to(here).as_posix() if self.file.is_relative_to(here) else self.file.as_posix()


@click.command("fix", help=_TEXT)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--code", help="Only of findings of this code.")
@click.option("--prove", is_flag=True, help="Check a copy of the script before and after the change.")
@click.option("--steps", type=click.IntRange(1), help="With --prove, optimizer steps. [default those of the run]")
def command(run_dir: Path, *, code: str | None, prove: bool, steps: int | None) -> Callable[[], int]:
    """Read the run, and return the action that looks for changes, to be run outside of click."""
    try:
        run = read_run(run_dir)
        findings = [each for each in read_findings(run_dir) if code is None or each.code == code.upper()]
        taken = [sum(map(int, dict(end.get("steps") or {}).values())) for end in read_outcomes(run_dir).values()]
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    most = steps or min(max(taken, default=_MOST_STEPS) + 1, _MOST_STEPS)  # one more, for what has ended the run
    return lambda: _act(run, findings, most if prove else None)


def _act(run: Mapping[str, Any], findings: list[Finding], steps: int | None) -> int:
    diffs = list(_diffs(run, findings))
    for diff in diffs:
        _say(f"{_about(diff.finding)}: {diff.about}")
        sys.stdout.buffer.write(diff.source.diff(diff.name).encode())  # as the file has it, whatever the terminal takes
        sys.stdout.buffer.flush()
    if not diffs:
        _say(f"no change is known for what was found; cures are known for {', '.join(sorted(CURES))}")
        return 1
    if steps is None:
        return 0
    return max([_prove(run, diff, steps) for diff in diffs])


def _diffs(run: Mapping[str, Any], findings: list[Finding]) -> Iterator[_Diff]:
    seen = set[tuple[str, Path]]()
    for finding in findings:
        if finding.code not in CURES:
            continue
        try:
            diff = _diff(run, finding)
        except CannotError as error:
            _say(f"{_about(finding)}: no change: {error}")
            continue
        if (finding.code, diff.file) not in seen:
            seen.add((finding.code, diff.file))
            yield diff


def _diff(run: Mapping[str, Any], finding: Finding) -> _Diff:
    """Return the change for a finding: in the file of its line, or in the script where it may stand elsewhere."""
    found = _LOCATION.fullmatch(finding.location or "")
    places: list[tuple[Callable[[], Path], int | None]] = []
    if found is not None:
        places.append((lambda: _users(Path(found["file"])), int(found["line"])))
    if finding.code in ELSEWHERE:
        places.append((lambda: _script(run), None))
    why = CannotError("the finding names no line")
    for number, (find, line) in enumerate(places):
        try:
            file = find()
            source, about = cure(_unchanged(run, file), finding, line)
        except CannotError as error:
            why = why if number else error
        else:
            return _Diff(finding=finding, file=file, source=source, about=about)
    raise why


def _script(run: Mapping[str, Any]) -> Path:
    words = run.get("command")
    if not isinstance(words, list) or not words or not str(words[0]).endswith(".py"):
        raise CannotError("the run does not say which file its script was")
    return _users(Path(str(words[0])))


def _users(file: Path) -> Path:
    if {"site-packages", "dist-packages"} & set(file.parts):
        raise CannotError(f"{clean(file)} belongs to a library")
    path = Path.cwd() / file
    if not path.is_file():
        raise CannotError(f"there is no file {clean(file)} here")
    return path.resolve()


def _unchanged(run: Mapping[str, Any], file: Path) -> bytes:
    try:
        began = datetime.fromisoformat(str(run.get("time"))).timestamp()
        if file.stat().st_mtime > began:
            raise CannotError(f"{clean(file)} has changed since the run")
        return file.read_bytes()
    except ValueError:
        raise CannotError("the run does not say when it began") from None
    except OSError as error:
        raise CannotError(f"{clean(file)} cannot be read: {error.strerror}") from None


def _about(finding: Finding) -> str:
    place = f" at {clean(finding.location)}" if finding.location else ""
    return f"{clean(finding.code, 40)} {clean(finding.title, 200)}{place}"


def _say(text: str) -> None:
    print(f"ddpdebug: {text}", file=sys.stderr, flush=True)


# --- proving ----------------------------------------------------------------------------------------------------------


def _prove(run: Mapping[str, Any], diff: _Diff, steps: int) -> int:
    """Check the script before and after a change; say what came of it and return the exit code."""
    try:
        cured, words = _proof(run, diff, steps)
    except CannotError as error:
        cured, words = False, f"not proved: {error}"
    _say(f"{diff.finding.code}: {words}")
    return 0 if cured else 1


def _proof(run: Mapping[str, Any], diff: _Diff, steps: int) -> tuple[bool, str]:
    """Return whether the change cures, and what the two checks have shown."""
    script, words = _script(run), [str(word) for word in run["command"][1:]]
    if any(HIDDEN in word for word in words):
        raise CannotError("its command line holds a secret, which the run directory does not have")
    if not diff.file.is_relative_to(script.parent):
        raise CannotError(f"{clean(diff.name)} does not lie below the script")
    ranks = run.get("world") or 1
    with tempfile.TemporaryDirectory(prefix="ddpdebug-fix-") as folder:
        copy = Path(folder) / "copy"
        _copy(script.parent, copy)
        line = [f"--nproc-per-node={ranks}", f"--steps={steps}", "--metrics=off", str(copy / script.name), *words]
        with progress("checking a copy as it is"):
            before, found_before = _check(Path(folder) / "before", line)
        (copy / diff.file.relative_to(script.parent)).write_bytes(diff.source.changed().encode())
        with progress("checking the changed copy"):
            after, found_after = _check(Path(folder) / "after", line)
    code, checked = diff.finding.code, f"in {counted(steps, 'step')} of {counted(ranks, 'rank')}"
    if code not in found_before:
        return False, f"not proved: the check of a copy does not find it {checked}; its verdict is {before}"
    new = [found for found, grave in found_after.items() if grave and found not in found_before]
    if after in _FAILED or code in found_after or new:
        told = ", ".join(clean(found, 40) for found in found_after) or "nothing"
        return False, f"not cured: after the change the verdict is {after}, found is {told}, {checked}"
    return True, f"cured: found before the change and not after it, {checked}"


def _check(folder: Path, line: list[str]) -> tuple[str, dict[str, bool]]:
    """Return the verdict's word, and the codes that were found: whether each is an error."""
    folder.mkdir()
    found = checked(folder, line)
    if not found.verdict:
        raise CannotError("the check has no verdict")
    return found.verdict, {each["code"]: each["severity"] in {"error", "critical"} for each in found.findings}


def _copy(source: Path, target: Path) -> None:
    """Copy the Python files of a folder; raise CannotError where there are too many."""
    count = 0
    for folder, folders, files in os.walk(source):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not (Path(folder) / name / "pyvenv.cfg").exists()
        ]
        place = target / Path(folder).relative_to(source)
        for name in files:
            if name.endswith(".py"):
                count += 1
                if count > _MAX_FILES:
                    raise CannotError(f"more than {_MAX_FILES} files of Python lie beside the script")
                place.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(folder) / name, place / name)
