"""`ddpdebug check`: `run` for CI, with a verdict and an exit code."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ddpdebug.commands._launch import RUN_ID, rank_words, ranks_environment, torchrun_words
from ddpdebug.commands._target import Request, target_command
from ddpdebug.commands.run import Ending, attach
from ddpdebug.config import Config, run_directory
from ddpdebug.errors import UsageError
from ddpdebug.findings import Finding, Severity
from ddpdebug.run_files import read_findings, read_outcomes, read_run
from ddpdebug.runner import Attached, end_hard, run_script
from ddpdebug.sinks.text import clean, subjects, where
from ddpdebug.supervisor import supervise
from ddpdebug.verdict import Outcome, Verdict, Word, judge
from ddpdebug.verdict_files import to_json, to_junit

_TEXT = """Run a training script like `ddpdebug run`, print a verdict and exit with it.

Exit codes: 0 clean, 1 findings at or above --fail-on, 2 wrong usage, 3 the script failed, 4 hang or lost rank.
"""
#: How long rank 0 waits under torchrun for the others to say how they ended.
_PEERS_SECONDS = 3.0
#: How long a rank with findings waits for a rank 0 that is still at work, for example writing a checkpoint.
_SLOW_SECONDS = 60.0
#: How long another rank needs to write and print the verdict.
_PUBLISHING_SECONDS = 1.0


def _act(request: Request) -> int:
    return _as_rank(request) if request.in_rank else _from_outside(request)


# --- started by a person or a CI job: the ranks are our children ----------------------------------------------------


def _from_outside(request: Request) -> int:
    config, run_id = request.config, secrets.token_hex(3)
    directory = config.out or Path.cwd() / run_directory(run_id, datetime.now(UTC))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {str(directory)!r}: {error.strerror}; name another with --out") from None
    world = config.nproc_per_node or 1
    with tempfile.TemporaryDirectory(prefix="ddpdebug-") as scratch:
        failures = Path(scratch) / "failures.json"
        words = rank_words(request, out=directory, as_check=True)
        if config.nproc_per_node is None:
            command = [sys.executable, "-m", "ddpdebug", *words]
        else:
            command = torchrun_words(world, words, ("ddpdebug.launcher", str(failures)))
        status = supervise(command, ranks_environment(run_id), config.timeout, RUN_ID)
        statuses = _statuses(status, failures, world, launched=config.nproc_per_node is not None)
    written = _run_id(directory) == run_id  # otherwise what lies there is from another run
    verdict = judge(
        read_findings(directory) if written else (),
        _outcomes(directory) if written else {},
        world=world,
        fail_on=Severity.parse(config.fail_on),
        timed_out=status is None,
        statuses=statuses,
    )
    _publish(verdict, config, directory)
    return verdict.exit_code


def _run_id(directory: Path) -> str | None:
    try:
        return str(read_run(directory)["run"])
    except (OSError, ValueError):
        return None


def _outcomes(directory: Path) -> dict[int, Outcome]:
    try:
        records = read_outcomes(directory)
    except (OSError, ValueError):
        return {}
    return {rank: Outcome.from_json({**record, "rank": rank}) for rank, record in records.items()}


def _statuses(status: int | None, failures: Path, world: int, *, launched: bool) -> dict[int, int]:
    if status is None:
        return {}
    if status == 0 or not launched:
        return dict.fromkeys(range(world), status)
    try:
        record: Mapping[str, int] = json.loads(failures.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return dict.fromkeys(range(world), status)  # the launcher itself failed
    return {int(rank): int(code) for rank, code in record.items()}


# --- under torchrun: this process is one rank -----------------------------------------------------------------------


def _as_rank(request: Request) -> int:
    config, rank = request.config, int(os.environ["RANK"])
    ending = Ending(None)
    deadline = threading.Timer(config.timeout, _give_up, (ending, config, rank))
    deadline.daemon = True

    def before() -> Attached:
        ending.monitor = attach(request, strict=True)
        deadline.start()
        return ending

    def conclude() -> int | None:
        deadline.cancel()
        if ending.exit_code is None:
            return None
        return _conclude(ending, config, rank)

    end_hard(conclude)  # the last thing that happens: the script's traceback stands above the verdict
    run_script(request.target, before=before)
    return 0


def _give_up(ending: Ending, config: Config, rank: int) -> None:
    code = _conclude(ending, config, rank, timed_out=True)
    sys.stderr.flush()
    os._exit(code)


def _conclude(ending: Ending, config: Config, rank: int, *, timed_out: bool = False) -> int:
    """Judge by what this rank knows, see to it that one rank publishes a verdict, and return the exit code."""
    findings: Sequence[Finding] = getattr(ending.monitor, "findings", ())
    directory: Path | None = getattr(ending.monitor, "directory", None)
    world = int(os.environ["WORLD_SIZE"])
    outcomes = {} if directory is None else _outcomes(directory)
    if rank == 0 and directory is not None and not timed_out:
        deadline = time.monotonic() + _PEERS_SECONDS
        while len(outcomes) < world and time.monotonic() < deadline:
            time.sleep(0.05)
            outcomes = _outcomes(directory)
    if ending.reason is not None:
        steps = outcomes[rank].steps if rank in outcomes else {}
        outcomes[rank] = Outcome(rank=rank, reason=ending.reason, exit_code=ending.exit_code, steps=steps)
    verdict = judge(
        findings,
        outcomes,
        world=world,
        fail_on=Severity.parse(config.fail_on),
        timed_out=timed_out,
        # a rank that has said nothing may be on another node, or may still be at work: no verdict about it
        statuses={} if timed_out else dict.fromkeys(range(world), 0),
    )
    claim = None if directory is None else directory / f".verdict-{getattr(ending.monitor, 'run_id', '')}"
    if _publishes(verdict, claim, rank):
        _publish(verdict, config, directory)
    return verdict.exit_code


def _publishes(verdict: Verdict, claim: Path | None, rank: int) -> bool:
    """Tell whether this rank publishes the verdict: rank 0, or the first that fails while rank 0 does not speak.

    torchrun ends all ranks as soon as one exits with an error, so a rank that is going to waits for rank 0's verdict.
    """
    if claim is None or (rank != 0 and verdict.exit_code == 0):
        return rank == 0
    if rank != 0:
        deadline = time.monotonic() + (_SLOW_SECONDS if verdict.word is Word.FINDINGS else _PEERS_SECONDS + 1)
        while not claim.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        time.sleep(_PUBLISHING_SECONDS)
        return False
    except OSError:
        return rank == 0
    return True


# --- the verdict ----------------------------------------------------------------------------------------------------


def _publish(verdict: Verdict, config: Config, directory: Path | None) -> None:
    run = None if directory is None else str(directory)
    for file, text in ((config.json, to_json(verdict, run)), (config.junit, to_junit(verdict, run))):
        if file is not None:
            try:
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                print(f"ddpdebug: could not write {str(file)!r}: {error.strerror}", file=sys.stderr)
    _print(verdict, run, config)


def _print(verdict: Verdict, run: str | None, config: Config) -> None:
    from rich.console import Console  # noqa: PLC0415 - not before it is needed
    from rich.text import Text  # noqa: PLC0415

    width = None if sys.stderr.isatty() else max(200, shutil.get_terminal_size().columns)
    console = Console(stderr=True, highlight=False, soft_wrap=True, width=width)
    style = "bold green" if verdict.word is Word.CLEAN else "bold red"
    line = Text.assemble(("ddpdebug: verdict: ", "bold"), (verdict.word.value, style))
    line.append(_detail(verdict, config.fail_on))
    console.print(line)
    for finding in verdict.failing:
        place = [part for part in (where(finding), ", ".join(subjects(finding))) if part]
        summary = " · ".join([f"{finding.code} {finding.severity.label}: {clean(finding.title)}", *place])
        console.print(Text(f"  {summary}"))
    for rank in verdict.blamed:
        console.print(Text(f"  rank {rank}: {clean(verdict.ranks[rank])}"))
    for note in verdict.notes:
        console.print(Text(f"  note: {note}"))
    if run is not None:
        console.print(Text(f"  run directory: {run}"))


def _detail(verdict: Verdict, fail_on: str) -> str:
    counts = f"{len(verdict.failing)} findings at {fail_on} or above, {len(verdict.others)} below"
    return f" (exit {verdict.exit_code}) · {counts}"


command = target_command("check", _act, _TEXT)
