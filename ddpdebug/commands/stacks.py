"""`ddpdebug stacks`: the call and the stack of every rank of a run, grouped by place."""

from __future__ import annotations

import json
import math
import os
import pwd
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ddpdebug.errors import UsageError
from ddpdebug.progress.asked import Answer, Asking
from ddpdebug.progress.boxes import (
    DEAD,
    ELSEWHERE,
    LIVE,
    MAX_RANKS,
    SILENT,
    RankState,
    Together,
    read_ranks,
    state_of,
    together,
)
from ddpdebug.progress.waits import Seen
from ddpdebug.run_directory.reader import RANKS, read_outcomes, read_run
from ddpdebug.sinks.words import clean, ranks_text

_TEXT = """Print where each rank of the run in RUN_DIR is: what it waits in, and its stack; once for ranks that agree.

Ranks on this host are read from their black boxes: fresh while they run, the last state of one that has ended, and with
what the kernel shows of one that gives no sign of life. Ranks on other hosts, and --all-threads, are asked by a file in
the run directory, which their owner alone may write. A rank whose interpreter does not run does not answer.
"""
#: Ranks look for the question about once a second, and those that cannot talk twice.
_ANSWER_SECONDS = 5.0
_STATES = {
    LIVE: "",
    SILENT: " (no sign of life, last seen)",
    DEAD: "",
    ELSEWHERE: " (on another host and did not answer, last seen)",
}
#: Ends after which nobody asks where in a library the rank stood.
_WELL = frozenset({"finished", "stopped"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What is known of a run."""

    run: str
    ended: str  # why the run has ended; empty while it goes on, or was killed
    world: int
    ranks: Mapping[int, RankState]
    threads: Mapping[int, Mapping[str, tuple[str, ...]]] | None

    @property
    def unknown(self) -> list[int]:
        """The ranks of which nothing is known."""
        return [rank for rank in range(min(self.world, MAX_RANKS)) if rank not in self.ranks]


@click.command("stacks", help=_TEXT)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--all-threads", is_flag=True, help="Ask the ranks for the frames of all their threads.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run_dir: Path, *, all_threads: bool, as_json: bool) -> Callable[[], int]:
    """Read the state of the ranks, and return the action that prints it, to be run outside of click."""
    try:
        run = read_run(run_dir)
        outcomes = read_outcomes(run_dir)
    except PermissionError:
        raise UsageError(_others(run_dir)) from None
    except (OSError, ValueError) as error:
        if run_dir.is_dir() and not os.access(run_dir, os.R_OK | os.X_OK):
            raise UsageError(_others(run_dir)) from None
        raise UsageError(str(error)) from None
    world, outcome = run.get("world") or 1, run.get("outcome")
    ended = str(outcome.get("reason") or "") if isinstance(outcome, dict) else ""
    found = _look(run_dir, str(run["run"]), world, ended, all_threads=all_threads)
    if not found.ranks:
        if not os.access(run_dir / RANKS, os.R_OK | os.X_OK) or run_dir.stat().st_uid != os.getuid():
            raise UsageError(_others(run_dir))
        raise UsageError(_nothing(run_dir, world, ended))
    ends = {rank: str(record["reason"]) for rank, record in outcomes.items()}

    def act() -> int:
        print(_as_json(found, ends) if as_json else _as_text(found), flush=True)
        return 0

    return act


def _look(directory: Path, run: str, world: int, ended: str, *, all_threads: bool) -> _Found:
    ranks = read_ranks(directory, world)
    asked = {rank for rank, one in ranks.items() if one.state == ELSEWHERE and not one.ended}
    if all_threads:
        asked |= {rank for rank, one in ranks.items() if one.state == LIVE}
    answers: dict[int, Answer] = {}
    if asked and not ended:
        if (directory / RANKS).stat().st_uid != os.getuid():
            raise UsageError(_others(directory))
        try:
            with Asking(directory, threads=all_threads) as asking:
                answers = asking.answers(asked, _ANSWER_SECONDS)
        except OSError as error:
            raise UsageError(f"cannot ask the ranks in {str(directory)!r}: {error.strerror or error}") from None
    fresh = {rank: state_of(rank, answer.look) for rank, answer in answers.items()}
    threads = {rank: answer.threads for rank, answer in answers.items()} if all_threads else None
    return _Found(run=run, ended=ended, world=world, ranks={**ranks, **fresh}, threads=threads)


def _others(directory: Path) -> str:
    owner = "another user"
    with suppress(OSError, KeyError):
        owner = f"user {pwd.getpwuid(directory.stat().st_uid).pw_name!r}"
    return f"the run in {str(directory)!r} belongs to {owner}, who alone may ask its ranks and read what they wrote"


def _nothing(directory: Path, world: int, ended: str) -> str:
    why = "one rank waits for nobody and keeps none" if world == 1 else "its ranks had not met"
    what = "has ended and left" if ended else "has"
    return f"the run in {str(directory)!r} {what} no black boxes: {why}"


# --- in words ---------------------------------------------------------------------------------------------------------


def _as_text(found: _Found) -> str:
    lines = []
    if found.ended:
        lines.append(f"run {clean(found.run, 60)} has ended ({clean(found.ended, 200)}); what each rank did last:")
    elif all(one.state == DEAD for one in found.ranks.values()):
        lines.append(f"run {clean(found.run, 60)} was killed: none of its ranks is alive; what each did last:")
    for group in together({rank: _in_short(one) for rank, one in found.ranks.items()}, found.threads):
        lines += _block(group)
    if found.unknown:
        lines.append(f"{ranks_text(found.unknown)}: nothing is known, there is no black box here")
    return "\n".join(lines)


def _in_short(one: RankState) -> RankState:
    """Return a rank's state in words for people: of one that has ended well, its last step and no frames."""
    if one.ended in _WELL:
        step = None if one.progress is None else one.progress.step
        words = one.ended if step is None or step < 0 else f"{one.ended} after step {step}"
        return replace(one, words=words, seen=Seen())
    return replace(one, words=one.words.replace("it has ended: ", "ended by ", 1))


def _block(group: Together) -> list[str]:
    lines = [f"{ranks_text(group.ranks)}{_STATES[group.state]}: {clean(group.words, 600)}"]
    if group.threads is None:
        return [*lines, *(f"    {clean(frame, 400)}" for frame in group.stack)]
    for name, stack in group.threads.items():
        lines += [f"  thread {clean(name, 120)}", *(f"    {clean(frame, 400)}" for frame in stack)]
    return lines


def _as_json(found: _Found, ends: Mapping[int, str]) -> str:
    groups: list[dict[str, Any]] = [
        {
            "ranks": list(group.ranks),
            "state": group.state,
            "words": group.words,
            "stack": list(group.stack),
            "threads": None if group.threads is None else {name: list(stack) for name, stack in group.threads.items()},
        }
        for group in together(found.ranks, found.threads)
    ]
    ranks = {
        str(rank): {
            "state": one.state,
            "seconds_since_sign_of_life": None if math.isnan(one.age) else round(one.age, 2),
            "ended": ends.get(rank) or one.ended or None,
            "step": None if one.progress is None else one.progress.step,
            "phase": None if one.progress is None else one.progress.phase,
            "place": None if one.progress is None else one.progress.place,
            "pid": None if one.progress is None else one.progress.pid,
        }
        for rank, one in found.ranks.items()
    }
    record = {
        "run": found.run,
        "ended": found.ended or None,
        "groups": groups,
        "ranks": ranks,
        "unknown": found.unknown,
    }
    return json.dumps(record, indent=1, ensure_ascii=False)
