"""The verdict of a check: one word and one exit code from findings and ranks' outcomes. Pure and torch-free."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ddpdebug.errors import essence
from ddpdebug.schema.coverage import Coverage, Weight
from ddpdebug.schema.ended import Ended, Kind, parse_end
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.hangs import ENDED, Parties, is_hang, is_over, parties, stands
from ddpdebug.sinks.words import clean, ranks_text, signal_name


class Word(Enum):
    """The result of a check in one word; the value is its name in files."""

    CLEAN = "clean"
    UNCHECKED = "not checked"
    FINDINGS = "findings"
    FAILED = "script failed"
    HANG = "hang"
    LOST = "lost rank"
    DAMAGED = "damaged"

    @property
    def exit_code(self) -> int:
        """The exit code of the command (2 is reserved for wrong usage)."""
        return {Word.CLEAN: 0, Word.UNCHECKED: 0, Word.FINDINGS: 1, Word.FAILED: 3}.get(self, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a rank by its own account (`ranks/<rank>/outcome.json`)."""

    rank: int
    reason: str
    exit_code: int | None
    steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def ended(self) -> Ended:
        """The parsed reason."""
        return parse_end(self.reason)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Outcome:
        """Parse an outcome file; raise ValueError or KeyError if it is malformed."""
        steps = {str(key): int(value) for key, value in dict(record.get("steps") or {}).items()}
        code = record.get("exit_code")
        return cls(
            rank=int(record["rank"]),
            reason=str(record["reason"]),
            exit_code=None if code is None else int(code),
            steps=steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check: one word, findings and the ranks' outcomes.

    Args:
        word: the worst that happened.
        failing: the findings that count, gravest first.
        others: the findings below the threshold.
        ranks: how each rank ended, in words.
        outcomes: the ranks' own accounts, where they could give one.
        blamed: the ranks that failed, were lost or hang.
        notes: what else a reader should know.
        ignored: the entries of `ignore`, with the number of findings that each has kept silent.
        coverage: what was looked at; None where nothing tells.
        required: with `--require-checks` something that is not checked fails the check.
        alone: there was one rank, and nobody has asked for one.
        hang: the finding that says who kept the others, where the job came to its end by that.
    """

    word: Word
    failing: tuple[Finding, ...]
    others: tuple[Finding, ...]
    ranks: Mapping[int, str]
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    blamed: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)
    coverage: Coverage | None = None
    required: bool = False
    alone: bool = False
    hang: Finding | None = None

    @property
    def story(self) -> tuple[str, ...]:
        """The hang in words: waiting ranks, their call and line, missing ranks, and their activity.

        A rank that has failed is told of by its own account.
        """
        if self.hang is None:
            return ()
        known, calls = parties(self.hang, len(self.ranks)), dict[str, list[int]]()
        for rank, call in known.waiting.items():
            calls.setdefault(call, []).append(rank)
        lines = [f"{ranks_text(ranks)} wait{'s' * (len(ranks) == 1)} in {clean(call)}" for call, ranks in calls.items()]
        told = [rank for rank in self.blamed if self.word is Word.FAILED]
        lines[:0] = [f"{who}: {clean(essence(words))}" for who, words in self.ends(told).items()]
        named = [rank for rank in known.missing if rank not in known.waiting and rank not in told]
        absent = dict[str, list[int]]()
        for rank in named:
            absent.setdefault(known.missing[rank], []).append(rank)
        lines += [
            f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} missing: {clean(words)}"
            for words, ranks in absent.items()
        ]
        if (difference := self.hang.evidence.get("difference")) not in {None, "unknown"}:
            lines.append(f"they differ in: {clean(difference, 60)}")
        return tuple(lines[:_MAX_STORY])

    def ends(self, ranks: Iterable[int]) -> dict[str, str]:
        """Return the outcomes of ranks, grouped by equal text: `ranks 0-3` -> text."""
        alike: dict[str, list[int]] = {}
        for rank in ranks:
            alike.setdefault(self.ranks[rank], []).append(rank)
        return {ranks_text(members): words for words, members in alike.items()}

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return self.word.exit_code or int(self.fails_unchecked)

    @property
    def fails_unchecked(self) -> bool:
        """Whether missing checks fail the run.

        It does where that is required, where nothing says that a step was seen, and where there was nothing to compare
        with.
        """
        if self.word is Word.CLEAN:
            return False
        if self.required or self.alone or self.coverage is None:
            return bool(self.unchecked)
        stepless = any(gap.part == "steps" and gap.weight is Weight.ESSENTIAL for gap in self.coverage.missed)
        told = any(sum(outcome.steps.values()) for outcome in self.outcomes.values())
        return stepless and not told and bool(self.unchecked)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The checks that were not made, in words; empty if a rank failed, hung or was lost, which weighs more."""
        if self.word in {Word.FAILED, Word.HANG, Word.LOST}:
            return ()
        words = [_ALONE] if self.alone else []
        if self.coverage is None:
            words += [_NOTHING_KNOWN] if self.word is Word.UNCHECKED else []
        else:
            words += [gap.words for gap in self.coverage.missed]
        return (*words, *_without_report(self))

    @property
    def title(self) -> str:
        """The verdict as a readable title."""
        return "no findings, but not checked" if self.word is Word.UNCHECKED else self.word.value


_MAX_STORY = 40
_ALONE = (
    "nothing is compared between ranks: there was one; start several with --nproc-per-node, or say with "
    "--nproc-per-node 1 that one is what you mean"
)
_ALONE_ON_PURPOSE = "one rank, as --nproc-per-node 1 asks for: nothing was compared between ranks"
_NOTHING_KNOWN = "no rank recorded what it checked; they may have ended too early"
#: What a rank says that lost its peer: the cause lies elsewhere.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed out waiting", re.IGNORECASE
)
#: The same where the peer does not just hang: its process has ended.
_GONE = re.compile(r"connection (was )?(closed|reset)|broken pipe", re.IGNORECASE)


class _End(Enum):
    DONE = "done"
    HUNG = "hung"
    BY_FINDING = "by a finding"
    FAILED = "failed"
    LOST = "lost"
    ENDED = "ended with the others"
    UNKNOWN = "unknown"


_WRONG = frozenset({_End.BY_FINDING, _End.FAILED, _End.HUNG, _End.LOST})


def judge(  # noqa: PLR0913 - all that is known of a run
    findings: Sequence[Finding],
    outcomes: Mapping[int, Outcome],
    *,
    world: int,
    fail_on: Severity = Severity.ERROR,
    timed_out: bool = False,
    hung: bool = False,
    statuses: Mapping[int, int] | None = None,
    places: Mapping[int, str] | None = None,
    script: int | None = None,
    damage: Sequence[str] = (),
) -> Verdict:
    """Judge a run that has ended.

    A hang that ended by itself is a warning, whatever it was before: nothing in the numbers comes of it, and what a
    machine does to its processes (a suspended runner, a stop and a continue) is no fault of what is checked.

    A hang comes before a lost rank, that before a failed script, that before findings: each makes the next
    unreliable. Where the others waited for a rank that has raised, the script failed. A rank that finished its work and
    then died in the interpreter's teardown (a torch bug) is not lost.

    Args:
        outcomes: by rank; a rank that could not write one is absent.
        hung: it was ended because of a hang that stood.
        statuses: exit statuses that the launcher saw, negative for a signal; ranks that it ended itself are absent.
        places: where the ranks were when the time was over, in words.
        script: exit status of a script that has started the ranks by itself, negative for a signal.
        damage: what cannot be read of the findings; a run that would be clean is not then.
    """
    statuses = statuses or {}
    ends = _ends(outcomes, statuses, world)
    all_done = all(end in {_End.DONE, _End.BY_FINDING} for end in ends.values())
    over = [finding for finding in findings if is_over(finding) or (is_hang(finding) and all_done and not timed_out)]
    weights = {id(f): f.severity for f in findings}
    weights.update((id(f), min(f.severity, Severity.WARNING)) for f in over)
    counting = [f for f in findings if weights[id(f)] >= fail_on and weights[id(f)] > Severity.INFO]
    counting.sort(key=lambda finding: -weights[id(finding)])
    counted = {id(finding) for finding in counting}
    hung = hung and not all_done
    hang = _hang(findings, ends, outcomes, ended=timed_out or hung)
    word, blamed = _worst(ends, outcomes, timed_out=timed_out or hung)
    if hang is not None:
        blamed = [rank for rank in hang.ranks if 0 <= rank < world] or blamed
        word = Word.LOST if hang.code == "HANG503" else Word.HANG
        if word is Word.LOST and not timed_out and any(_failed_by_itself(rank, ends, outcomes) for rank in blamed):
            word = Word.FAILED
    if word is Word.FAILED and (early := _left_early(ends, outcomes, blamed)):
        blamed = early
    notes = [*_notes(ends, statuses), *map(_over, over), *damage]
    if word is Word.CLEAN and script and _End.BY_FINDING not in ends.values():
        word = Word.LOST if script < 0 else Word.FAILED
        how = f"died by {signal_name(-script)}" if script < 0 else f"ended with exit status {script}"
        notes.insert(0, f"the script, which has started the ranks by itself, {how} although they ended well")
    if word is Word.CLEAN and (counting or _End.BY_FINDING in ends.values()):
        word = Word.FINDINGS
    if word is Word.CLEAN and damage:
        word = Word.DAMAGED
    return Verdict(
        word=word,
        failing=tuple(counting),
        others=tuple(finding for finding in findings if id(finding) not in counted),
        ranks={
            rank: _in_hang(rank, outcomes.get(rank), None if hang is None else parties(hang, world))
            or (
                _late(outcomes.get(rank), (places or {}).get(rank))
                if timed_out or hung
                else _words(
                    ends[rank], outcomes.get(rank), statuses.get(rank), early=word is Word.FAILED and rank in blamed
                )
            )
            for rank in range(world)
        },
        hang=hang,
        outcomes=outcomes,
        blamed=tuple(blamed),
        notes=tuple(notes),
    )


def _over(finding: Finding) -> str:
    seconds = finding.evidence.get(ENDED)
    after = "" if seconds is None else f" after {clean(seconds, 20)} s"
    return f"{clean(finding.code, 20)} {clean(finding.title, 200)}: it was over{after}, and counts as a warning"


def _hang(
    findings: Sequence[Finding], ends: Mapping[int, _End], outcomes: Mapping[int, Outcome], *, ended: bool
) -> Finding | None:
    """Return the hang by which a run came to its end; None where it went on, or failed by itself."""
    if all(end in {_End.DONE, _End.BY_FINDING} for end in ends.values()):
        return None
    standing = [finding for finding in findings if stands(finding)]
    hung = [rank for rank, end in ends.items() if end is _End.HUNG]
    if not standing or ended or hung:
        named = {outcomes[rank].ended.code for rank in hung}
        return next((finding for finding in standing if finding.code in named), next(iter(standing), None))
    if any(_failed_by_itself(rank, ends, outcomes) for rank in ends):
        return None
    # who has gone is told by the ends themselves, alike whether or not the others had the time to notice it
    return next((finding for finding in standing if finding.code != "HANG503"), None)


def _failed_by_itself(rank: int, ends: Mapping[int, _End], outcomes: Mapping[int, Outcome]) -> bool:
    return ends.get(rank) is _End.FAILED and not _lost_its_peer(outcomes.get(rank))


def _in_hang(rank: int, outcome: Outcome | None, known: Parties | None) -> str:
    """Return what a rank did in a hang; empty where its own account says more, or nothing is known."""
    if known is None or (outcome is not None and not (outcome.ended.kind is Kind.HANG or _lost_its_peer(outcome))):
        return ""
    if rank in known.waiting:
        return f"waits in {known.waiting[rank]}"
    return f"is missing: {known.missing[rank]}" if rank in known.missing else ""


def with_coverage(
    verdict: Verdict, coverage: Coverage | None, *, required: bool = False, ranks: int | None = None
) -> Verdict:
    """Return the verdict with the run's coverage: a run that nobody checked is not clean.

    Args:
        coverage: None where nothing tells.
        required: `--require-checks`.
        ranks: `--nproc-per-node`; of a run of one rank nobody knows otherwise whether there should have been more.
    """
    if coverage is not None:
        coverage = coverage.beside(finding.code for finding in (*verdict.failing, *verdict.others))
    single = coverage is not None and coverage.world == 1  # a script may start ranks that the launcher knows nothing of
    known = replace(verdict, coverage=coverage, required=required, alone=single and ranks != 1)
    if single and not known.alone:
        known = replace(known, notes=(*known.notes, _ALONE_ON_PURPOSE))
    if known.word is Word.CLEAN and (coverage is None or known.unchecked):
        return replace(known, word=Word.UNCHECKED)
    return known


def _without_report(verdict: Verdict) -> list[str]:
    """Say of ranks that came to their end without saying so that their last steps may be missing."""
    silent = [rank for rank in verdict.ranks if rank not in verdict.outcomes and rank not in verdict.blamed]
    if not silent:
        return []
    why = "by os._exit, or out of reach of rank 0"
    return [f"{ranks_text(silent)} left without a report ({why}): what was seen last may be missing"]


def _worst(ends: Mapping[int, _End], outcomes: Mapping[int, Outcome], *, timed_out: bool) -> tuple[Word, list[int]]:
    if timed_out:
        return Word.HANG, [rank for rank in ends if rank not in outcomes]
    for end, word in ((_End.LOST, Word.LOST), (_End.HUNG, Word.HANG), (_End.FAILED, Word.FAILED)):
        blamed = [rank for rank in ends if ends[rank] is end]
        if blamed:
            return word, blamed
    return Word.CLEAN, []


def _ends(outcomes: Mapping[int, Outcome], statuses: Mapping[int, int], world: int) -> dict[int, _End]:
    ends = {rank: _end(outcomes.get(rank), statuses.get(rank)) for rank in range(world)}
    first = [rank for rank, end in ends.items() if end in _WRONG and not _lost_its_peer(outcomes.get(rank))]
    if not first and any(_lost_its_peer(outcomes.get(rank)) for rank, end in ends.items() if end is _End.FAILED):
        # somebody has gone whom nobody could ask: who left without a word, whatever the launcher made of it
        gone = [rank for rank, end in ends.items() if end is _End.DONE and rank not in outcomes]
        unknown = [rank for rank, end in ends.items() if end is _End.UNKNOWN]
        if not gone and len(unknown) == 1 and any(_GONE.search(outcome.reason) for outcome in outcomes.values()):
            gone = unknown  # of several, the launcher may have ended all but one
        ends |= dict.fromkeys(gone, _End.LOST)
    for rank, end in ends.items():
        alone = not set(first) - {rank}
        if end is _End.UNKNOWN:
            # the launcher ends all other ranks as soon as one of them goes wrong
            ends[rank] = _End.ENDED if first or any(statuses.values()) else _End.LOST
        elif end is _End.FAILED and rank not in first and not alone:
            ends[rank] = _End.ENDED
        elif end is _End.LOST and not alone:
            # pulled down by a rank that went wrong by itself, unless that one was killed in the same way
            gravest = max(_gravity(ends[other], statuses.get(other)) for other in first if other != rank)
            ends[rank] = _End.ENDED if _gravity(end, statuses.get(rank)) < gravest else end
    return ends


def _left_early(ends: Mapping[int, _End], outcomes: Mapping[int, Outcome], failed: Sequence[int]) -> list[int]:
    """Return the ranks that finished after fewer steps than those that failed for want of them."""
    if not all(_lost_its_peer(outcomes.get(rank)) for rank in failed):
        return []
    reached = min(sum(outcomes[rank].steps.values()) for rank in failed)
    done = [rank for rank, end in ends.items() if end is _End.DONE and rank in outcomes]
    return [rank for rank in done if sum(outcomes[rank].steps.values()) <= reached]


def _gravity(end: _End, status: int | None) -> int:
    """Order ends by how likely they are a cause: launchers send SIGTERM, and torch may abort when a peer has gone."""
    order = {-signal.SIGTERM: 0, -signal.SIGABRT: 1}
    return 2 if end is _End.FAILED or status is None else order.get(status, 2)


def _lost_its_peer(outcome: Outcome | None) -> bool:
    return outcome is not None and _LOST_PEER.search(outcome.reason) is not None


def _end(outcome: Outcome | None, status: int | None) -> _End:
    if outcome is not None:
        if outcome.ended.kind is Kind.FINDING:
            return _End.BY_FINDING
        if outcome.ended.kind is Kind.HANG:
            return _End.HUNG
        failed = outcome.exit_code not in {0, None} or (status or 0) > 0
        return _End.FAILED if failed else _End.DONE
    if status is None:
        return _End.UNKNOWN
    if status == 0:
        return _End.DONE  # os._exit(0)
    return _End.FAILED if status > 0 else _End.LOST


def _words(end: _End, outcome: Outcome | None, status: int | None, *, early: bool = False) -> str:
    if outcome is not None and early and end is _End.DONE:
        return f"left after {sum(outcome.steps.values())} optimizer steps while others went on: {outcome.reason}"
    if outcome is not None:
        return outcome.reason
    if status is None or (status == 0 and end is _End.LOST):
        return "ended by the launcher" if end is _End.ENDED else "ended without reporting why"
    if status < 0:
        return f"died by {signal_name(-status)}"
    return f"exited with status {status} and reported no reason (os._exit, or it never started)"


def _late(outcome: Outcome | None, place: str | None) -> str:
    if outcome is not None:
        return outcome.reason
    return "did not end in time" + (f": {place}" if place else ", and nobody knows where it was")


def _notes(ends: Mapping[int, _End], statuses: Mapping[int, int]) -> list[str]:
    return [
        f"rank {rank} had finished and then died by {signal_name(-status)} while the interpreter ended: a known "
        "fault of torch, not counted"
        for rank, status in sorted(statuses.items())
        if status < 0 and ends.get(rank) is _End.DONE
    ]
