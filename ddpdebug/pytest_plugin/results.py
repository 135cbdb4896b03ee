"""Merging of the ranks' reports into one test result: the first failure that follows from no other. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest

from ddpdebug.pytest_plugin.stacks import place, text_of, waits_for_peers
from ddpdebug.sinks.words import signal_name

_PHASES: tuple[Literal["setup", "call", "teardown"], ...] = ("setup", "call", "teardown")
_LINE_LENGTH = 160


@dataclass(slots=True)
class RankResult:
    """The state and the reports of one rank in one test."""

    rank: int
    reports: list[dict[str, Any]] = field(default_factory=list)  # serialised, in order
    started: bool = False
    finished: bool = False  # it has reported everything
    lacking: str | None = None  # why it has no such test
    lacking_time: float = 0.0
    status: int | None = None  # it ended before it was finished; negative for a signal
    end_time: float = 0.0
    at_deadline: bool | None = None  # ended by us: at the deadline, or some time after another's failure
    stack: str = ""
    output: str = ""

    @property
    def over(self) -> bool:
        """Whether the rank sends nothing more about the test."""
        return self.finished or self.status is not None or self.at_deadline is not None

    @property
    def sound(self) -> bool:
        """Whether the rank's process can run another test."""
        fine = all(r["outcome"] == "passed" or (r["outcome"], r["when"]) == ("skipped", "setup") for r in self.reports)
        return self.finished and fine and self.lacking is None

    def failed_by_itself(self) -> bool:
        """Whether the rank failed for another reason than the loss of a peer."""
        failed = any(r["outcome"] == "failed" and not r["ddpdebug"]["lost_peer"] for r in self.reports)
        return failed or self.lacking is not None or self.status is not None


class Failure(NamedTuple):
    """One rank's failure of a test; the cause sorts before its consequences."""

    echo: bool  # it lost a peer
    time: float
    rank: int
    what: str  # in words, after "rank 1 "
    report: pytest.TestReport | None = None


class Merger:
    """Merges the results of the ranks into the reports of one test.

    Args:
        load: turns a serialised report into a report.
        root: file names are shown relative to this.
    """

    def __init__(
        self, item: pytest.Item, ranks: Sequence[RankResult], load: Callable[[dict[str, Any]], Any], root: str
    ) -> None:
        self._item, self._ranks, self._root = item, ranks, root
        self._reports: dict[int, dict[str, pytest.TestReport]] = {
            result.rank: {report.when: report for report in map(load, result.reports)} for result in ranks
        }
        self._xfailed = [rank for rank in self._reports if any(map(_is_xfail, self._of(rank)))]

    def reports(self, timeout: float) -> list[pytest.TestReport]:
        """Return the reports of the phases, at most one of them a failure."""
        failures = sorted(self._failures(timeout))
        if failures:
            made = self._failed(failures[0], failures)
        else:
            model = self._xfailed[0] if self._xfailed else 0
            made = [self._copy(report) for report in self._of(model)]
        decisive = next((r for r in made if r.outcome != "passed"), made[min(1, len(made) - 1)])
        first = failures[0].rank if failures else 0
        decisive.sections = list(self._sections(first, decisive if failures else None))
        if made[-1] is not decisive:  # JUnit files take the output from the last phase
            made[-1].sections = [(name, text) for name, text in decisive.sections if name.startswith("Captured std")]
        return made

    def _of(self, rank: int) -> list[pytest.TestReport]:
        return [self._reports[rank][phase] for phase in _PHASES if phase in self._reports[rank]]

    # --- what went wrong ----------------------------------------------------------------------------------------------

    def _failures(self, timeout: float) -> Iterator[Failure]:
        for result in self._ranks:
            for report in self._of(result.rank):
                if report.failed and not (self._xfailed and _is_strict_pass(report)):
                    facts: Mapping[str, Any] = report.ddpdebug
                    verb = "lost its peer" if facts["lost_peer"] else "failed"
                    what = f"{verb}: {_headline(report)}"
                    yield Failure(facts["lost_peer"], facts["time"], result.rank, what, report)
            if result.lacking is not None:
                yield Failure(echo=False, time=result.lacking_time, rank=result.rank, what=result.lacking)
            elif result.status is not None and not result.finished:
                yield Failure(echo=False, time=result.end_time, rank=result.rank, what=_death(result.status))
            elif result.at_deadline:
                where = place(result.stack, self._root)
                what = f"did not finish in {timeout:g} s: it was at {where}"
                yield Failure(waits_for_peers(result.stack), result.end_time, result.rank, what)
        yield from self._uneven_skip()

    def _uneven_skip(self) -> Iterator[Failure]:
        """A test that some ranks skip has not been run on all of them."""
        skipped = [rank for rank in self._reports if any(map(_is_skip, self._of(rank)))]
        if skipped and len(skipped) < len(self._ranks):
            report = next(report for report in self._of(skipped[0]) if _is_skip(report))
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            what = f"skipped the test and others did not ({reason}); skip it on all ranks or on none"
            yield Failure(False, report.ddpdebug["time"], skipped[0], what)

    # --- the reports --------------------------------------------------------------------------------------------------

    def _failed(self, cause: Failure, failures: Sequence[Failure]) -> list[pytest.TestReport]:
        summary = "\n".join(self._summary(cause, failures))
        if cause.report is None:
            setup = self._reports[cause.rank].get("setup")
            fine = setup is not None and setup.passed
            made = [self._copy(setup)] if fine and setup is not None else [bare_report(self._item, "setup")]
            made.append(bare_report(self._item, "call", "failed", f"rank {cause.rank} {cause.what}\n\n{summary}"))
            made.append(bare_report(self._item, "teardown"))
        else:
            made = [self._copy(report) for report in self._of(cause.rank)]
            if made[-1].when != "teardown":
                made.append(bare_report(self._item, "teardown"))
            _explain(next(r for r in made if r.when == cause.report.when), cause.rank, summary)
        for report in made:
            report.user_properties = [*report.user_properties, ("rank", cause.rank)]
        return made

    def _summary(self, cause: Failure, failures: Sequence[Failure]) -> Iterator[str]:
        """Yield a line for each rank: how it ended."""
        for result in self._ranks:
            own = [failure for failure in failures if failure.rank == result.rank]
            if own and own[0] is cause:
                text = f"{cause.what.splitlines()[0]}  <- first"
            elif own:
                later = own[0].time - cause.time
                text = f"{own[0].what.splitlines()[0]} ({abs(later):.2f} s {'later' if later >= 0 else 'earlier'})"
            elif result.at_deadline is False:
                text = f"was still running at {place(result.stack, self._root)}; ended"
            else:
                outcomes = [report.outcome for report in self._of(result.rank) if report.outcome != "passed"]
                text = outcomes[0] if outcomes else "passed"
            line = f"rank {result.rank} {text}"
            yield line if len(line) <= _LINE_LENGTH else f"{line[: _LINE_LENGTH - 1]}…"

    def _copy(self, report: pytest.TestReport) -> pytest.TestReport:
        """Take over a rank's report; a phase takes as long as in the slowest rank."""
        peers = [phases[report.when] for phases in self._reports.values() if report.when in phases]
        report.duration = max(peer.duration for peer in peers)
        report.sections = []
        return report

    def _sections(self, first: int, failed: pytest.TestReport | None) -> Iterator[tuple[str, str]]:
        """Yield what else the ranks have to show, that of the rank to blame first."""
        for result in sorted(self._ranks, key=lambda result: result.rank != first):
            if failed is not None:
                for report in self._of(result.rank):
                    if report.failed and report is not failed:
                        yield f"failure of rank {result.rank} ({report.when})", report.longreprtext
                if stack := text_of(result.stack):
                    yield f"stack of rank {result.rank} when it was ended", stack
            if result.output:
                yield f"Captured stdout and stderr of rank {result.rank}", result.output
            if result.reports:  # the last has those of all phases
                yield from ((f"{name} of rank {result.rank}", text) for name, text in result.reports[-1]["sections"])


def bare_report(item: pytest.Item, when: Any, outcome: Any = "passed", text: str | None = None) -> pytest.TestReport:
    """Return a report for a phase that no rank has reported."""
    keywords: dict[str, Any] = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, text, when)


def _explain(report: pytest.TestReport, rank: int, summary: str) -> None:
    """Put the rank and the summary of all ranks where a reader sees them first."""
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection("ranks", summary)
        if getattr(longrepr, "reprcrash", None) is not None:
            longrepr.reprcrash.message = f"rank {rank}: {longrepr.reprcrash.message}"
    else:
        report.longrepr = f"rank {rank}: {report.longreprtext}\n\n{summary}"


def _headline(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr).strip()
    return text.splitlines()[0] if text else "without a word"


def _death(status: int) -> str:
    return f"died by {signal_name(-status)}" if status < 0 else f"left with exit status {status} before it reported"


def _is_xfail(report: pytest.TestReport) -> bool:
    return report.skipped and hasattr(report, "wasxfail")


def _is_skip(report: pytest.TestReport) -> bool:
    return report.skipped and not hasattr(report, "wasxfail")


def _is_strict_pass(report: pytest.TestReport) -> bool:
    return isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]")
