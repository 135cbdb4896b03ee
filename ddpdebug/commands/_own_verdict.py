"""The verdict of a rank of `ddpdebug check` that torchrun or srun started: no parent process of ours judges there."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ddpdebug.ci.publish import Witness, publish, reported, with_ignored
from ddpdebug.ci.verdict import Outcome, Verdict, Word, judge, with_coverage
from ddpdebug.disk import PRIVATE, Disk, mode_of
from ddpdebug.printing import say
from ddpdebug.processes import stacks
from ddpdebug.processes.launch import Request
from ddpdebug.run_directory.reader import RANKS, STACKS
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.hangs import is_hang, name_of

#: How long rank 0 waits under torchrun and srun for the others to say how they ended; who is silent then is lost.
_REPORT_SECONDS = 60.0
#: How long another rank that fails leaves rank 0 the first word.
_PEERS_SECONDS = 3.0
#: How long a rank with findings waits for a rank 0 that is still at work, for example writing a checkpoint.
_SLOW_SECONDS = 60.0
#: How long another rank needs to write and print the verdict.
_PUBLISHING_SECONDS = 1.0


class Ending(Protocol):
    """The end of this rank's script, as the rank knows it; the reason is None while the script runs."""

    @property
    def monitor(self) -> object:
        """The monitor that was attached."""

    @property
    def reason(self) -> str | None:
        """Why the script has ended."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the script."""


def conclude(
    ending: Ending, request: Request, rank: int, *, timed_out: bool = False, hang: Finding | None = None
) -> int:
    """Judge the run as this rank knows it, have one rank publish the verdict, and return the exit code."""
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
    say(f"ddpdebug: rank {rank} did not end in time: {found[rank]}\n")
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
