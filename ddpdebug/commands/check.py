"""`ddpdebug check`: `run` for CI, with a verdict and an exit code."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ddpdebug.ci.golden_facts import hold_to
from ddpdebug.ci.last_calls import judge_last_calls
from ddpdebug.ci.publish import Witness, findings_of, judge_directory, publish, reported
from ddpdebug.ci.verdict import Outcome, Verdict, judge
from ddpdebug.clock import time, utc_now
from ddpdebug.commands._rank import CHECK, Plan, planned
from ddpdebug.commands._target import target_command
from ddpdebug.config.settings import Config, run_directory
from ddpdebug.disk import Disk, mode_of
from ddpdebug.errors import UsageError
from ddpdebug.facts.comparison import facts_of
from ddpdebug.facts.fact import Facts
from ddpdebug.printing import say
from ddpdebug.processes import stacks
from ddpdebug.processes.launch import RUN_ID, Request, rank_words, ranks_environment, torchrun_words
from ddpdebug.processes.supervisor import supervise
from ddpdebug.progress.asked import Asking
from ddpdebug.progress.boxes import MAX_RANKS
from ddpdebug.run_directory.reader import (
    CHECK as WITNESS,
    FINDINGS,
    RANKS,
    SPAWNED,
    STACKS,
    read_findings,
    read_run,
    read_spawned,
)
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.hangs import Standing, is_hang
from ddpdebug.sinks.text import findings_text

_TEXT = """Run a training script like `ddpdebug run`, print a verdict and exit with it.

Exit codes: 0 clean, 1 findings at or above --fail-on, 2 wrong usage, 3 the script failed, 4 hang or lost rank. What was
not checked is said; with --require-checks it exits with 1.
"""


def _act(request: Request) -> int | Plan:
    config = request.config
    if request.in_rank and config.golden is not None:
        raise UsageError("--golden compares once the ranks have ended; run it outside of torchrun and srun")
    return planned(request, CHECK) if request.in_rank else _from_outside(request)


# --- started by a person or a CI job: the ranks are our children ----------------------------------------------------


def _from_outside(request: Request) -> int:
    config, run_id = request.config, secrets.token_hex(3)
    if (error := request.target.syntax_error()) is not None:  # before any rank is started
        print(error, end="", file=sys.stderr)
        failed = Outcome(rank=0, reason=f"exception: {error.splitlines()[-1]}", exit_code=1)
        return publish(judge((), {0: failed}, world=1), config, None, request.target.name)
    golden = None if config.golden is None else facts_of(config.golden)  # which may be the run that is put away now
    directory = _directory(config, run_id)
    try:
        verdict = _verdict(request, directory, run_id, golden)
    except KeyboardInterrupt:
        found = findings_text(findings_of(directory, run_id))
        say(f"ddpdebug: interrupted · {found} · {directory}\n")
        return 130
    return publish(verdict, config, directory, request.target.name)


def _verdict(request: Request, directory: Path, run_id: str, golden: Facts | None) -> Verdict:
    config, given = request.config, {key: value for key, value in request.given.items() if key != "golden"}
    witness, disk = run_ranks(replace(request, given=given), directory, run_id), Disk(mode_of(config.file_mode))
    # without a run directory, say, the ends of the ranks are judged all the same
    with contextlib.suppress(OSError, UsageError, ValueError):
        judge_last_calls(directory, witness.statuses, disk)
    note = "" if golden is None else hold_to(golden, directory, disk)
    verdict = judge_directory(directory, witness, config.fail_on, require_checks=config.require_checks)
    return replace(verdict, notes=(*verdict.notes, note)) if note else verdict


def run_ranks(request: Request, directory: Path, run_id: str) -> Witness:
    """Start the ranks, wait at most `--timeout` seconds for their end, and return the record of it."""
    config = request.config
    world, found = config.nproc_per_node or 1, dict[int, str]()
    with tempfile.TemporaryDirectory(prefix="ddpdebug-") as scratch:
        failures, folder = Path(scratch) / "failures.json", Path(scratch) / "stacks"
        folder.mkdir()
        words = rank_words(request, out=directory, as_check=True)
        if config.nproc_per_node is None:
            command = [sys.executable, "-m", "ddpdebug", *words]
        else:
            command = torchrun_words(world, words, failures)
        watch = HangWatch(directory, run_id)

        def late() -> None:
            found.update(_asked(directory, world) if watch.stands else stacks.collect(*_who(folder, world)))

        status = supervise(
            command,
            {
                **ranks_environment(run_id),
                stacks.DEADLINE: stacks.deadline(config.timeout, folder),
            },
            config.timeout,
            RUN_ID,
            late=late,
            over=watch.look,
        )
        statuses = _statuses(status, failures, world, launched=config.nproc_per_node is not None)
    script = None
    if config.nproc_per_node is None and (spawned := read_spawned(directory, run_id)) is not None:
        (world, statuses), script = spawned, status
    disk = Disk(mode_of(config.file_mode))
    for rank, text in found.items():
        _keep(directory, rank, text, disk)
    witness = Witness(
        run=run_id,
        world=world,
        timed_out=status is None and not watch.stands,
        hung=status is None and watch.stands,
        statuses=statuses,
        places={rank: stacks.place(text) for rank, text in found.items()},
        script=script,
        asked=config.nproc_per_node,
    )
    witness.save(directory, disk)
    return witness


class HangWatch:
    """Reads the run directory for hangs: a hang that persists decides the run, which then need not go on."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directories, self._run = (directory, directory / SPAWNED), run_id
        self._standing, self._files, self._findings = Standing(), dict[Path, tuple[int, int]](), list[Finding]()
        self.stands = False

    def look(self) -> bool:
        """Return whether a hang has persisted for its time of grace."""
        files = {}
        for directory in self._directories:
            for file in (directory / FINDINGS, *directory.glob(f"{RANKS}/*/{FINDINGS}")):
                with contextlib.suppress(OSError):
                    known = file.stat()
                    files[file] = known.st_mtime_ns, known.st_size
        if files != self._files:
            self._files = files
            found = (finding for directory in self._directories for finding in read_findings(directory))
            self._findings = [finding for finding in found if is_hang(finding) and finding.run == self._run]
        due = self._standing.due(self._findings, time.monotonic())
        self.stands = due is not None and not self._all_have_ended()
        return self.stands

    def _all_have_ended(self) -> bool:
        """Return whether all ranks came to their end: then there is nothing to wait for but the launcher."""
        for directory in self._directories:
            with contextlib.suppress(ValueError):
                world = read_run(directory).get("world")
                return world is not None and len(reported(directory)) >= world
        return False


def _asked(directory: Path, world: int) -> dict[int, str]:
    """Return the stacks of the ranks that answer, as faulthandler writes them: the training thread's last."""
    places = [path for path in (directory / SPAWNED, directory) if (path / RANKS).is_dir()]
    if not places:
        return {}
    try:
        with Asking(places[0], threads=True) as asking:
            answers = asking.answers(set(range(min(world, MAX_RANKS))), stacks.PATIENCE_SECONDS)
    except OSError:
        return {}
    return {rank: stacks.as_text(answer.threads, answer.look.stack) for rank, answer in answers.items()}


def _directory(config: Config, run_id: str) -> Path:
    """Make the run directory; where nobody named one and none can be made here, it is a temporary one."""
    directory = config.out or Path.cwd() / run_directory(run_id, utc_now())
    try:
        Disk(mode_of(config.file_mode)).begin(directory)
        (directory / WITNESS).unlink(missing_ok=True)  # of an earlier run
    except OSError as error:
        if config.out is None:
            return Path(tempfile.mkdtemp(prefix=f"ddpdebug-{run_id}-"))
        raise UsageError(f"cannot make {str(directory)!r}: {error.strerror}; name another with --out") from None
    return directory


def _keep(directory: Path, rank: int, text: str, disk: Disk) -> None:
    with contextlib.suppress(OSError):  # the verdict says the essence of it
        folder = directory / RANKS / str(rank)
        disk.make_directory(folder, below=directory)
        if disk.refusal(folder, len(text), "summaries") is None:
            disk.write(folder / STACKS, text.encode("utf-8", "backslashreplace"))


def _who(folder: Path, world: int) -> tuple[Path, Iterable[int]]:
    """Return where the stacks of the ranks lie, and whose: of those that the script has started, if there are any."""
    own = folder / stacks.SPAWNED
    ranks = [int(file.name) for file in own.iterdir() if file.name.isdecimal()] if own.is_dir() else []
    return (own, ranks) if ranks else (folder, range(world))


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


command = target_command("check", _act, _TEXT)
