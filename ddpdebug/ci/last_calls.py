"""Judges the last calls of ranks that died before one of them could: a collective that does not fit may abort them all.

The notes of each rank are in its black box, which outlives it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddpdebug.clock import utc_now
from ddpdebug.disk import Disk
from ddpdebug.progress import black_box
from ddpdebug.progress.apart import parted
from ddpdebug.progress.boxes import read_ranks
from ddpdebug.progress.waits import Seen, mismatch
from ddpdebug.run_directory.reader import FINDINGS, RANKS, SPAWNED, read_findings, read_run
from ddpdebug.schema.progress import Noted


def judge_last_calls(directory: Path, statuses: Mapping[int, int], disk: Disk) -> None:
    """Add a finding to those of a run that a rank's abort has ended, where the ranks' last calls do not match.

    Args:
        statuses: of the ranks' processes, as the launcher has them.
    """
    if -signal.SIGABRT not in statuses.values():
        return
    place = directory / SPAWNED if (directory / SPAWNED).is_dir() else directory
    if any(finding.code.startswith("HANG") for finding in read_findings(place)):
        return  # a rank has judged
    run = read_run(place)
    world = run.get("world") or len(statuses)
    notes = {rank: _notes(place, rank) for rank in range(world)}
    known = parted({rank: own for rank, own in notes.items() if own})
    if known is None or not known.clash:
        return
    seen = {rank: state.seen for rank, state in read_ranks(place, world).items()}
    calls = {rank: noted.call for rank, noted in known.clash.items()}
    hang = replace(
        mismatch(calls, {rank: seen.get(rank) or Seen() for rank in calls}),
        step=min(noted.step for noted in known.clash.values()),
        phase="collective",
        parted={str(rank): noted.words() for rank, noted in known.first.items()},
    )
    from ddpdebug.diagnosis.engine import Diagnosis  # noqa: PLC0415 - all rules, of which other checks need none

    diagnosis = Diagnosis(world=world, config=run.get("config"))
    diagnosis.tell(hang.topic, min(calls), hang)
    now = f"{utc_now():%Y-%m-%dT%H:%M:%SZ}"
    for finding, _ in diagnosis.tick():
        said = replace(finding, time=now, run=str(run["run"]), id="last calls")
        disk.append(place / FINDINGS, said.to_json().encode() + b"\n")


def _notes(directory: Path, rank: int) -> list[Noted]:
    box = black_box.read(directory / RANKS / str(rank) / black_box.NAME)
    return [noted for note in (() if box is None else box.notes) if (noted := Noted.read(note.text)) is not None]
