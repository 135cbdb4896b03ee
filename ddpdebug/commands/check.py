"""`ddpdebug check`: `run` for CI, with a verdict and an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddpdebug.ci.extra_runs import follow_path, prove_detectors, record_path
from ddpdebug.ci.publish import Witness, judge_directory, publish, reported, with_ignored
from ddpdebug.ci.verdict import Outcome, Verdict, Word, judge, with_coverage
from ddpdebug.clock import time, utc_now
from ddpdebug.commands._target import target_command
from ddpdebug.commands.run import Ending, attach
from ddpdebug.config.settings import Config, run_directory
from ddpdebug.disk import PRIVATE, Disk, mode_of
from ddpdebug.errors import UsageError
from ddpdebug.isolation.background import Timer
from ddpdebug.processes import stacks
from ddpdebug.processes.launch import OVER, RUN_ID, Request, rank_words, ranks_environment, torchrun_words
from ddpdebug.processes.script import Attached, end_hard, run_script
from ddpdebug.processes.supervisor import supervise
from ddpdebug.progress.asked import Asking
from ddpdebug.progress.boxes import MAX_RANKS
from ddpdebug.run_directory.reader import CHECK, FINDINGS, RANKS, SPAWNED, STACKS, read_findings, read_run, read_spawned
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.hangs import Standing, is_hang, name_of

_TEXT = """Run a training script like `ddpdebug run`, print a verdict and exit with it.

Exit codes: 0 clean, 1 findings at or above --fail-on, 2 wrong usage, 3 the script failed, 4 hang or lost rank. What was
not checked is said; with --require-checks it exits with 1.
"""
#: How long rank 0 waits under torchrun and srun for the others to say how they ended; who is silent then is lost.
_REPORT_SECONDS = 60.0
#: How long another rank that fails leaves rank 0 the first word.
_PEERS_SECONDS = 3.0
#: How long a rank with findings waits for a rank 0 that is still at work, for example writing a checkpoint.
_SLOW_SECONDS = 60.0
#: How long another rank needs to write and print the verdict.
_PUBLISHING_SECONDS = 1.0


def _act(request: Request) -> int:
    config = request.config
    modes = [f"--{name.replace('_', '-')}" for name in ("self_test", "record", "golden") if getattr(config, name)]
    if len(modes) > 1:
        raise UsageError(f"{modes[0]} and {modes[1]} do different things; give one of them")
    if request.in_rank and modes:
        raise UsageError(f"{modes[0]} starts its own ranks; run it outside of torchrun and srun")
    return _as_rank(request) if request.in_rank else _from_outside(request)


# --- started by a person or a CI job: the ranks are our children ----------------------------------------------------


def _from_outside(request: Request) -> int:
    config, run_id = request.config, secrets.token_hex(3)
    directory = _directory(config, run_id)
    if config.self_test:
        verdict = prove_detectors(request, directory, run_ranks)
    elif config.record is not None:
        verdict = record_path(request, directory, run_ranks)
    elif config.golden is not None:
        verdict = follow_path(request, directory, run_ranks)
    else:
        witness = run_ranks(request, directory, run_id)
        verdict = judge_directory(directory, witness, config.fail_on, require_checks=config.require_checks)
    return publish(verdict, config, directory, request.target.name)


def run_ranks(request: Request, directory: Path, run_id: str, environ: Mapping[str, str] | None = None) -> Witness:
    """Start the ranks, wait for their end at most as long as `--timeout` says, and return what was seen of them."""
    config = request.config
    world, found = config.nproc_per_node or 1, dict[int, str]()
    with tempfile.TemporaryDirectory(prefix="ddpdebug-") as scratch:
        failures, folder = Path(scratch) / "failures.json", Path(scratch) / "stacks"
        folder.mkdir()
        words = rank_words(request, out=directory, as_check=True)
        if config.nproc_per_node is None:
            command = [sys.executable, "-m", "ddpdebug", *words]
        else:
            command = torchrun_words(world, words, ("ddpdebug.processes.torchrun", str(failures)))
        watch = HangWatch(directory, run_id)

        def late() -> None:
            found.update(_asked(directory, world) if watch.stands else stacks.collect(*_who(folder, world)))
            with contextlib.suppress(OSError):
                failures.with_name(OVER).touch()

        status = supervise(
            command,
            {
                **ranks_environment(run_id),
                **(environ or {}),
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
    """Reads along in the run directory whether a hang stands: then the run comes to nothing, and need not wait."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directories, self._run = (directory, directory / SPAWNED), run_id
        self._standing, self._files, self._findings = Standing(), dict[Path, tuple[int, int]](), list[Finding]()
        self.stands = False

    def look(self) -> bool:
        """Return whether a hang has stood for its time of grace."""
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
        (directory / CHECK).unlink(missing_ok=True)  # of an earlier run
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


# --- under torchrun: this process is one rank -----------------------------------------------------------------------


def _as_rank(request: Request) -> int:
    rank = int(os.environ["RANK"])
    ending = Ending()
    deadlines: list[Timer] = []

    def before() -> Attached:
        deadlines.append(Timer("ddpdebug-timeout", request.config.timeout, _give_up, ending, request, rank))
        ending.monitor = attach(request, strict=True)
        if ending.monitor is not None:
            ending.monitor.ends_hang = lambda hang: _give_up(ending, request, rank, hang)
        return ending

    def conclude() -> int | None:
        for deadline in deadlines:
            deadline.cancel()
        if ending.exit_code is None:
            return None
        return _conclude(ending, request, rank)

    end_hard(conclude)  # the last thing that happens: the script's traceback stands above the verdict
    run_script(request.target, before=before)
    return 0


def _give_up(ending: Ending, request: Request, rank: int, hang: Finding | None = None) -> None:
    code = _conclude(ending, request, rank, timed_out=hang is None, hang=hang)
    sys.stderr.flush()
    os._exit(code)


def _conclude(
    ending: Ending, request: Request, rank: int, *, timed_out: bool = False, hang: Finding | None = None
) -> int:
    """Judge by what this rank knows, see to it that one rank publishes a verdict, and return the exit code."""
    config, world = request.config, int(os.environ["WORLD_SIZE"])
    findings: list[Finding] = list(getattr(ending.monitor, "findings", ()))
    if hang is not None and name_of(hang) not in map(name_of, filter(is_hang, findings)):
        findings.append(hang)  # another rank has judged it
    directory: Path | None = getattr(ending.monitor, "directory", None)
    run_id = str(getattr(ending.monitor, "run_id", ""))
    disk = Disk(mode_of(config.file_mode))
    places = _places(directory, rank, world, disk) if timed_out else {}
    outcomes = {} if directory is None else reported(directory)
    if rank == 0 and directory is not None and not timed_out and hang is None and ending.exit_code == 0:
        deadline = time.monotonic() + (0.0 if _never_met(ending.monitor) else _REPORT_SECONDS)
        while len(outcomes) < world and time.monotonic() < deadline and not _is_bad(outcomes):
            time.sleep(0.2)
            outcomes = reported(directory)
    if ending.reason is not None:
        steps = outcomes[rank].steps if rank in outcomes else {}
        outcomes[rank] = Outcome(rank=rank, reason=ending.reason, exit_code=ending.exit_code, steps=steps)
    # only rank 0 has waited for all: to another one, a rank that has said nothing may be at work or on another node
    unknown = timed_out or hang is not None or (rank == 0 and not _never_met(ending.monitor))
    statuses = {} if unknown else dict.fromkeys(range(world), 0)
    verdict = judge(
        findings,
        outcomes,
        world=world,
        fail_on=Severity.parse(config.fail_on),
        timed_out=timed_out,
        hung=hang is not None,
        statuses=statuses,
        places=places,
    )
    coverage: Coverage | None = getattr(ending.monitor, "coverage", None)
    verdict = with_coverage(verdict, coverage, required=config.require_checks, ranks=config.nproc_per_node)
    verdict = with_ignored(verdict, directory)
    claim = None if directory is None else directory / f".verdict-{run_id}"
    if _publishes(verdict, claim, rank):
        if directory is not None:
            seen = statuses if rank == 0 else {}
            witness = Witness(
                run=run_id,
                world=world,
                timed_out=timed_out,
                hung=hang is not None,
                places=places,
                statuses=seen,
                asked=config.nproc_per_node,
            )
            witness.save(directory, disk)
        return publish(verdict, config, directory, request.target.name)
    return verdict.exit_code


def _never_met(monitor: object) -> bool:
    """Return whether this rank never heard the others: their reports cannot have come to its directory."""
    coverage: Coverage | None = getattr(monitor, "coverage", None)
    return coverage is not None and coverage.joined is None and bool(coverage.apart)


def _is_bad(outcomes: Mapping[int, Outcome]) -> bool:
    """Return whether a rank has failed: the launcher ends the silent ones then, and none need be waited for."""
    return any(outcome.exit_code not in {0, None} for outcome in outcomes.values())


def _places(directory: Path | None, rank: int, world: int, disk: Disk) -> dict[int, str]:
    """Write this rank's stacks and read those of the others, which write theirs at the same moment."""
    folder = (directory or Path(tempfile.mkdtemp(prefix="ddpdebug-"))) / RANKS
    found = {rank: stacks.place(stacks.write_now(folder / str(rank) / STACKS, disk))}
    print(f"ddpdebug: rank {rank} did not end in time: {found[rank]}", file=sys.stderr, flush=True)
    if directory is not None:
        time.sleep(stacks.PATIENCE_SECONDS)
        for other in set(range(world)) - {rank}:
            with contextlib.suppress(OSError):
                found[other] = stacks.place((folder / str(other) / STACKS).read_text(encoding="utf-8"))
    return found


def _publishes(verdict: Verdict, claim: Path | None, rank: int) -> bool:
    """Return whether this rank publishes the verdict: rank 0, or the first to fail while rank 0 says nothing.

    torchrun ends all ranks as soon as one exits with an error, so a rank that is going to waits for rank 0's verdict.
    """
    if claim is None or (rank != 0 and verdict.exit_code == 0):
        return rank == 0
    if rank != 0:
        deadline = time.monotonic() + (_SLOW_SECONDS if verdict.word is Word.FINDINGS else _PEERS_SECONDS + 1)
        while not claim.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    try:
        claim.touch(PRIVATE, exist_ok=False)
    except FileExistsError:
        time.sleep(_PUBLISHING_SECONDS)
        return False
    except OSError:
        return rank == 0
    return True


command = target_command("check", _act, _TEXT)
