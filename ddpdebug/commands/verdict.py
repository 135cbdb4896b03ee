"""`ddpdebug verdict`: the verdict of a run that has ended, from its run directory."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddpdebug.ci.publish import FORMS, Witness, judge_directory, publish, run_of
from ddpdebug.ci.verdict import Verdict, Word, judge
from ddpdebug.commands._target import check_outputs, click_option
from ddpdebug.config.settings import Config, options
from ddpdebug.detectors.nature import nature
from ddpdebug.errors import UsageError
from ddpdebug.run_directory.reader import RANKS, DamagedError, read_run
from ddpdebug.sinks.words import clean

_TEXT = """Print the verdict of the run in RUN_DIR and exit with it.

Launchers (torchrun, srun) flatten exit codes; this gives those of `check` back: 0 clean, 1 findings at or above
--fail-on, 2 wrong usage or no run directory, 3 the script failed, 4 hang, lost rank, or findings that cannot be read.
A rank without a report counts as lost. What was not checked is said; with --require-checks it exits with 1.
With another --format than text the verdict goes to standard output, in that form and nothing else; the exit code is the
same.
"""


@click.command("verdict", help=_TEXT, params=[click_option(option) for option in options("verdict")])
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", *FORMS]),
    default="text",
    help="Form of the verdict: for people, as JSON, as SARIF 2.1.0 for code scanning, as Markdown for the summary of a "
    "job, as annotations of GitHub. [default text]",
)
@click.option(
    "--restart",
    is_flag=True,
    help="Print whether a restart may help, and why; exit with 0 where it may, 1 where not, 4 where nobody knows.",
)
def command(run_dir: Path, form: str, *, restart: bool, **given: Any) -> Callable[[], int]:
    """Check the line, and return the action that judges."""
    if restart and form != "text":
        raise UsageError("--restart answers in words and by its exit status; in JSON each finding has `restart`")
    config = Config.load(given, os.environ, Path.cwd(), flags=True)
    if not run_dir.is_dir():
        raise UsageError(f"{str(run_dir)!r} is no directory; give the run directory, which `--out` named")
    check_outputs(config)
    return lambda: _restart(run_dir, config) if restart else _act(run_dir, config, form)


def _act(directory: Path, config: Config, form: str) -> int:
    return publish(_judged(directory, config), config, directory, _script(directory), form, stream=sys.stdout)


def _restart(directory: Path, config: Config) -> int:
    verdict = _judged(directory, config)
    written = publish(verdict, config, directory, _script(directory), stream=io.StringIO())
    if verdict.word is Word.DAMAGED or written != verdict.exit_code:
        sys.stdout.write(f"restart: unknown\n  {_UNKNOWN}\n")
        return Word.DAMAGED.exit_code
    against = verdict.word is Word.FAILED and not verdict.failing
    words = [_AGAIN] if against else []
    for finding in verdict.failing:
        if (found := nature(finding)) is not None:
            against |= not found.helps
            words.append(f"{clean(finding.code, 20)} ({found.value}): {found.advice}")
    lines = [f"restart: {'no' if against else 'yes'}", *(f"  {line}" for line in dict.fromkeys(words or [_NOTHING]))]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(against)


_UNKNOWN = "the findings cannot be read, or a file of the verdict cannot be written"
_NOTHING = "no finding says that the same happens again"
_AGAIN = "the script failed by itself, and no finding says that it may go well the next time"


def _judged(directory: Path, config: Config) -> Verdict:
    witness = Witness.of(directory)
    try:
        return judge_directory(directory, witness, config.fail_on, require_checks=config.require_checks)
    except DamagedError:
        raise
    except ValueError as error:
        if not (directory / RANKS).exists():
            raise UsageError(str(error)) from None
        return judge((), {}, world=1)  # somebody began here, and nobody said how it ended


def _script(directory: Path) -> str:
    words = read_run(directory).get("command") if run_of(directory) is not None else None
    first = words[0] if isinstance(words, list) and words else ""
    return str(first) or "script"
