"""Judging a run directory and publishing the verdict: files, CI services, terminal. For `check` and `verdict`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from ddpdebug.ci.github_gitlab import to_codequality, to_github, to_markdown
from ddpdebug.ci.json_junit import to_json, to_junit
from ddpdebug.ci.sarif import to_sarif
from ddpdebug.ci.verdict import Outcome, Verdict, Word, judge, with_coverage
from ddpdebug.clock import utc_now
from ddpdebug.config.settings import Config
from ddpdebug.disk import Disk
from ddpdebug.errors import essence
from ddpdebug.redaction import Redactor
from ddpdebug.run_directory.reader import (
    CHECK,
    MAX_WORLD,
    PREVIOUS,
    RUN,
    SPAWNED,
    DamagedError,
    damage,
    read_check,
    read_ends,
    read_findings,
    read_ignored,
    read_outcomes,
    read_run,
    read_spawned,
    read_steps,
)
from ddpdebug.schema.coverage import Coverage, Tally
from ddpdebug.schema.ended import Kind, parse_end
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks.fanout import redacted_finding
from ddpdebug.sinks.text import ignored_texts, subjects, where
from ddpdebug.sinks.words import clean, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """The launcher's account of the ranks (exit statuses, time-out, places), kept as `check.json`.

    `hung` is of a run that was ended because of a hang that stood, before its time was over.
    `script` is the exit status of a script that has started the ranks by itself; None where it is a rank.
    `asked` is the number of ranks that somebody has asked for (`--nproc-per-node`).
    """

    run: str
    world: int
    timed_out: bool = False
    hung: bool = False
    statuses: Mapping[int, int] = field(default_factory=dict)
    places: Mapping[int, str] = field(default_factory=dict)
    script: int | None = None
    asked: int | None = None

    @classmethod
    def of(cls, directory: Path) -> Witness | None:
        """Read the launcher's account from a run directory; None if there is none or it is malformed."""
        record = read_check(directory)
        if record is None:
            return None
        try:
            return cls(
                run=str(record["run"]),
                world=min(MAX_WORLD, max(1, int(record["world"]))),
                timed_out=record["timed_out"] is True,
                hung=record.get("hung") is True,
                statuses={int(rank): int(status) for rank, status in dict(record["statuses"]).items()},
                places={int(rank): clean(place) for rank, place in dict(record["places"]).items()},
                script=None if record.get("script") is None else int(record["script"]),
                asked=None if record.get("asked") is None else int(record["asked"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    def save(self, directory: Path, disk: Disk) -> None:
        """Write the account for `ddpdebug verdict`; if the directory cannot be written, only print that."""
        try:
            disk.replace(directory / CHECK, [json.dumps(asdict(self)).encode() + b"\n"])
        except OSError as error:
            print(f"ddpdebug: could not write {CHECK}: {error.strerror}", file=sys.stderr)


def judge_directory(directory: Path, witness: Witness | None, fail_on: str, *, require_checks: bool = False) -> Verdict:
    """Judge a run by the files of its ranks and by the launcher's account.

    Raises:
        ValueError: nothing says which run this is, or how many ranks it had.
    """
    known = run_of(directory)
    world = witness.world if witness is not None else read_run(directory).get("world")
    if world is None:
        raise ValueError(f"the run in {str(directory)!r} does not say how many ranks it had")
    written = known is not None and (witness is None or known == witness.run)  # else it is from another run
    outcomes, coverage = (reported(directory), covered(directory, world)) if written else ({}, None)
    statuses = {} if witness is None else witness.statuses
    if not statuses and coverage is not None and coverage.apart and coverage.joined is None:
        # the others could not report to this directory: silence says nothing about them
        statuses = dict.fromkeys(range(world) if 0 in outcomes else (), 0)
    late = witness is not None and witness.timed_out
    if late and known is not None and len(outcomes) == world and read_spawned(directory, known) is not None:
        # a script that waits for a word of its ranks, which `--steps` has stopped, is no hang of these
        late = any(outcome.ended.kind is not Kind.STOPPED for outcome in outcomes.values())
    damaged = [*(damage(directory) if written else ()), *_lost(directory, known, witness)]
    verdict = judge(
        findings_of(directory, known) if written else (),
        outcomes,
        world=world,
        fail_on=Severity.parse(fail_on),
        timed_out=late,
        hung=witness is not None and witness.hung,
        statuses=statuses,
        places=None if witness is None else witness.places,
        script=None if witness is None else witness.script,
        damage=damaged,
    )
    verdict = with_ignored(verdict, directory if written else None)
    return with_coverage(verdict, coverage, required=require_checks, ranks=None if witness is None else witness.asked)


def _lost(directory: Path, known: str | None, witness: Witness | None) -> list[str]:
    """Return in words why the files of a run that has ended are not all that was found."""
    if not directory.is_dir():
        return ["the run directory is gone: what was found cannot be known"]
    if witness is not None and not (directory / CHECK).exists():  # what could not be written now could not before
        return ["the run directory cannot be written: what was found last may be missing"]
    return [f"{RUN} cannot be read"] if known is None and (directory / RUN).exists() else []


def with_ignored(verdict: Verdict, directory: Path | None) -> Verdict:
    """Return the verdict with the findings that `ignore` suppressed in a run."""
    ignored = {} if directory is None else read_ignored(directory)
    return replace(verdict, ignored=ignored, notes=(*verdict.notes, *ignored_texts(ignored)))


def findings_of(directory: Path, run: str | None) -> list[Finding]:
    """Return the findings of a run; if a script started ranks several times, those of all starts."""
    earlier = [path for path in (directory / SPAWNED, *sorted(directory.glob(PREVIOUS))) if path.is_dir()]
    found = [finding for path in earlier if run and read_spawned(path, run) for finding in read_findings(path)]
    return [*found, *read_findings(directory)]


def covered(directory: Path, world: int) -> Coverage | None:
    """Return the coverage of a run: its own record, or a count over its rows if that record is incomplete."""
    try:
        known = Coverage.from_json(read_run(directory).get("coverage"))
        if known is not None and known.ended:
            return known
        tally = Tally(world)
        for step in read_steps(directory):
            tally.add(step)
    except (OSError, ValueError):
        return None
    ranks = {} if known is None else {rank.rank: rank for rank in known.ranks}
    return tally.coverage(ranks, apart="" if known is None else known.apart, certain=True, ended=True)


def run_of(directory: Path) -> str | None:
    """Return the id of the run whose files lie in a directory; DamagedError if they cannot be those of a run."""
    try:
        return str(read_run(directory)["run"])
    except DamagedError:
        raise
    except (OSError, ValueError):
        return None


def reported(directory: Path) -> dict[int, Outcome]:
    """Return the outcome of each rank by its own account: from its file, else from its announcement to rank 0."""
    try:
        records = read_outcomes(directory)
        ends = read_ends(directory)
    except (OSError, ValueError):
        return {}
    outcomes = {}
    for rank, end in ends.items():
        outcomes[rank] = _outcome({**end, "rank": rank, "exit_code": 0 if parse_end(end["reason"]).is_in_order else 1})
    for rank, record in records.items():
        outcomes[rank] = _outcome({**record, "rank": rank}) or outcomes.get(rank)
    return {rank: outcome for rank, outcome in sorted(outcomes.items()) if outcome is not None}


def _outcome(record: Mapping[str, Any]) -> Outcome | None:
    try:
        return Outcome.from_json(record)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None  # an incomplete report is none


# --- telling --------------------------------------------------------------------------------------------------------


def publish(
    verdict: Verdict,
    config: Config,
    directory: Path | None,
    script: str,
    form: str = "text",
    *,
    stream: TextIO | None = None,
) -> int:
    """Write the requested files, annotate on CI services, print the verdict; return the exit code.

    It prints to `stream`, which is standard error where a script has printed beside it.

    A file that cannot be written is a verdict that somebody does not get: that is no clean one.

    Args:
        form: `text` or one of `FORMS`; of these standard output gets the verdict, and nothing else says anything.
    """
    verdict = _redacted(verdict, Redactor(sys.argv))
    run = None if directory is None else str(directory)
    if lost := _write_all(verdict, config, run, script):
        word = verdict.word if verdict.exit_code else Word.DAMAGED
        verdict = replace(verdict, word=word, notes=(*verdict.notes, *lost))
        _write_all(verdict, config, run, script)
    if form != "text":
        return _put(verdict, FORMS[form](verdict, run, script))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        lost = [_write(Path(summary), lambda: to_markdown(verdict, run), add=True)]
        verdict = replace(verdict, notes=(*verdict.notes, *filter(None, lost)))
    _speak(verdict, run, config, stream or sys.stderr)
    return verdict.exit_code


def _put(verdict: Verdict, text: str) -> int:
    """Write the verdict to standard output; one that nobody gets is no clean one."""
    try:
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        sys.stdout.buffer.flush()
    except (AttributeError, OSError, ValueError):
        sys.stdout = None  # what stays in its buffer would be written again as the interpreter ends
        return verdict.exit_code or Word.DAMAGED.exit_code
    return verdict.exit_code


#: The forms of a verdict for other programs; text is for people.
FORMS: Mapping[str, Callable[[Verdict, str | None, str], str]] = {
    "json": lambda verdict, run, script: to_json(verdict, run),
    "sarif": lambda verdict, run, script: to_sarif(verdict, script, _root()),
    "markdown": lambda verdict, run, script: to_markdown(verdict, run),
    "github": lambda verdict, run, script: "".join(f"{line}\n" for line in to_github(verdict, _root())),
}


def _write_all(verdict: Verdict, config: Config, run: str | None, script: str) -> list[str]:
    """Write the files that were asked for; return in words which of them could not be written."""
    now = utc_now().strftime("%Y-%m-%dT%H:%M:%S")
    lost = [
        _write(config.json, lambda: to_json(verdict, run)),
        _write(config.junit, lambda: to_junit(verdict, run, time=now)),
        _write(config.markdown, lambda: to_markdown(verdict, run)),
        _write(config.codequality, lambda: to_codequality(verdict, script, _root())),
    ]
    return [words for words in lost if words]


def _root() -> str:
    return os.environ.get("GITHUB_WORKSPACE") or os.environ.get("CI_PROJECT_DIR") or str(Path.cwd())


def _speak(verdict: Verdict, run: str | None, config: Config, stream: TextIO | None) -> None:
    """Print the verdict; where nobody can read it, the exit code says it still.

    What stays in a stream's buffer would be written again as the interpreter ends, which would exit with 120.
    """
    try:
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in to_github(verdict, _root()):
                print(line, flush=True)
    except (OSError, ValueError):
        sys.stdout = None  # as Python has it where there is none
    try:
        if stream is not None:
            _print(verdict, run, config, stream)
            stream.flush()
    except (OSError, ValueError):
        if stream is sys.stdout:
            sys.stdout = None
        else:
            sys.stderr = None


def _redacted(verdict: Verdict, redactor: Redactor) -> Verdict:
    """Return the verdict as it may be shown: exceptions and findings may quote the command line."""
    ends = {rank: replace(end, reason=redactor.text(end.reason)) for rank, end in verdict.outcomes.items()}
    return replace(
        verdict,
        failing=tuple(redacted_finding(finding, redactor) for finding in verdict.failing),
        others=tuple(redacted_finding(finding, redactor) for finding in verdict.others),
        ranks={rank: redactor.text(words) for rank, words in verdict.ranks.items()},
        outcomes=ends,
        notes=tuple(map(redactor.text, verdict.notes)),
        hang=None if verdict.hang is None else redacted_finding(verdict.hang, redactor),
    )


def _write(file: Path | None, text: Callable[[], str], *, add: bool = False) -> str:
    """Write a file, if there is to be one; return in words why it could not be written."""
    if file is None:
        return ""
    try:
        with file.open("a" if add else "w", encoding="utf-8", errors="backslashreplace") as opened:
            opened.write(text())
    except OSError as error:
        return f"could not write {str(file)!r}: {error.strerror or error}"
    return ""


def _print(verdict: Verdict, run: str | None, config: Config, stream: TextIO) -> None:
    from rich.console import Console  # noqa: PLC0415 - not before it is needed
    from rich.text import Text  # noqa: PLC0415

    width = None if stream.isatty() else max(200, shutil.get_terminal_size().columns)
    console = Console(file=stream, highlight=False, soft_wrap=True, width=width)
    style = "bold green" if verdict.exit_code == 0 else "bold red"
    if verdict.word is Word.UNCHECKED and verdict.exit_code == 0:
        style = "bold yellow"
    line = Text.assemble(("ddpdebug: verdict: ", "bold"), (verdict.title, style))
    counts = f"{counted(len(verdict.failing), 'finding')} at {config.fail_on} or above, {len(verdict.others)} below it"
    console.print(line.append(f" (exit {verdict.exit_code}) · {counts}"))
    for finding in verdict.failing:
        place = [part for part in (where(finding), ", ".join(subjects(finding))) if part]
        summary = " · ".join([f"{finding.code} {finding.severity.label}: {clean(finding.title)}", *place])
        console.print(Text(f"  {summary}"))
    for words in verdict.unchecked:
        console.print(Text(f"  not checked: {clean(words)}"))
    for words in verdict.story:
        console.print(Text(f"  {words}"))
    for who, words in verdict.ends(verdict.blamed if not verdict.story else ()).items():
        console.print(Text(f"  {who}: {clean(essence(words))}"))
    for note in verdict.notes:
        console.print(Text(f"  note: {note}"))
    if run is not None:
        console.print(Text(f"  run directory: {run}"))
