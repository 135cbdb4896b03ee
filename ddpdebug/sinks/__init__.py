"""Records, and the sinks that write them. A sink has one method, never raises into training, calls no collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ddpdebug.errors import NEEDS
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The first record: command, place and settings of the run."""

    run_id: str
    rank: int
    world: int
    directory: Path | None
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    command: tuple[str, ...] = ()
    time: str = ""  # UTC, ISO 8601
    metrics_url: str | None = None  # of this rank
    node: str = ""
    local_rank: int = 0
    spawned: bool = False  # the script has started its ranks by itself
    name: str = ""  # the run's, for people
    scheduler_job: str = ""  # the id that the cluster's scheduler knows it by
    owner: str = ""  # whose process it is
    place: Mapping[str, str] = field(default_factory=dict)  # by what the scheduler and its users know the job


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJudged:
    """One step of all ranks, after the detectors judged it."""

    step: Step
    steps: int = 1  # that it stands for: itself, and those before it that had no rows
    interval: int = 1  # the sampled tier runs every so many steps
    overhead_ratio: float = float("nan")  # time in ddpdebug / time of the steps without it, of the newest steps
    overhead_of_run: float = float("nan")  # the same, of all steps so far
    overhead_seconds: float = float("nan")  # time in ddpdebug, of all steps so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """The ranks that compare themselves now, and their distance in steps; sent every few seconds and on a change."""

    members: tuple[int, ...]  # ascending; empty once they can no longer talk
    apart: int = 0  # steps between the fastest and the slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Waiting ranks, the ranks waited for, and the verdict; sent every few seconds while it lasts, and at its end."""

    state: WaitState = WaitState.NONE
    ranks: tuple[int, ...] = ()  # that are waited for
    phase: str | None = None  # of the first of these, and its line
    location: str | None = None
    seconds: Mapping[int, float] = field(default_factory=dict)  # by rank, of those that wait
    alone: bool = False  # the other ranks cannot be told
    line: str = ""  # what a person should read of it, once for each wait


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRaised:
    """A new finding (`new`), or a known one seen again (its count and last step have grown)."""

    finding: Finding
    new: bool = True


@dataclass(frozen=True, slots=True)
class FindingIgnored:
    """A finding that `ignore` suppresses, new or seen again: it is kept and counted."""

    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A part of ddpdebug failed and switched itself off, or cannot observe something; the job goes on."""

    part: str  # for example "probe:batches", "exchange", "detector:RANK101", "sink:prometheus"
    message: str

    @property
    def follows(self) -> bool:
        """Whether the trouble follows from that of another part, which is reported by itself."""
        before, after = NEEDS.split("{}")
        return self.message.startswith(before) and self.message.endswith(after)

    @property
    def is_failure(self) -> bool:
        """Whether a part has switched itself off; otherwise the message itself names what is not observed."""
        part = self.part.partition(" of rank ")[0]
        return part not in {"companion", "device", "guard", "judging", "threads", "torch"} and not part.startswith(
            ("sink:run_directory ", "sink:hub ")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Raw observations to be saved for a later judgement: kind is `detail`, `fact` or `last_state`."""

    kind: str
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """The coverage of the run so far: the checks that were made and those that were not."""

    coverage: Coverage
    say: tuple[str, ...] = ()  # what a person should read now, a line each
    keep: bool = True  # worth writing down: it has changed in more than its counts, or some time has passed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last record of a rank: the reason for which its script ended."""

    #: "finished", "stopped" (after --steps), "interrupted" (Ctrl-C), "exception: <type>: <text>", "hang: <code> ..."
    reason: str
    exit_code: int | None
    steps: Mapping[int, int]  # optimizer -> steps
    time: str = ""


Record = RunStarted | StepJudged | Met | Waiting | FindingRaised | FindingIgnored | Trouble | Saved | Covered | RunEnded


class Sink(Protocol):
    """A destination of records: the terminal, the run directory, Prometheus, the hub."""

    def write(self, record: Record) -> None:
        """Write one record; ignore kinds that do not concern this sink."""
