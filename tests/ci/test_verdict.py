"""The verdict's rules, with literals."""

from __future__ import annotations

import json

import pytest

from ddpdebug.ci.json_junit import to_json
from ddpdebug.ci.verdict import Outcome, Word, judge, with_coverage
from ddpdebug.schema.coverage import Tally
from ddpdebug.schema.finding import Finding, Severity

_WAITED = "exception: RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
_PEER = "exception: RuntimeError: gloo/transport/tcp/pair.cc:547 Connection closed by peer [127.0.0.1]:40"
_ABORT, _KILL, _TERM, _SEGV = -6, -9, -15, -11


def _done(rank: int, reason: str = "finished", code: int | None = 0, steps: int = 5) -> Outcome:
    return Outcome(rank=rank, reason=reason, exit_code=code, steps={"0": steps})


def _failed(rank: int, reason: str = "exception: ValueError: x", code: int = 1) -> Outcome:
    return _done(rank, reason, code)


def _finding(code: str = "RANK101", severity: Severity = Severity.CRITICAL) -> Finding:
    return Finding(code=code, severity=severity, title="parameters differ", step=3, ranks=(1,), subject=("w\x00",))


BOTH = {0: _done(0), 1: _done(1)}

#: name -> (findings, outcomes, statuses, timed out, word, exit code, blamed)
CASES = {
    "all finished": ([], BOTH, {0: 0, 1: 0}, False, Word.CLEAN, 0, ()),
    "stopped": ([], {r: _done(r, "stopped") for r in (0, 1)}, {0: 0, 1: 0}, False, Word.CLEAN, 0, ()),
    "finding": ([_finding()], BOTH, {0: 0, 1: 0}, False, Word.FINDINGS, 1, ()),
    "warning only": ([_finding("SYNC207", Severity.WARNING)], BOTH, {}, False, Word.CLEAN, 0, ()),
    "ended by a finding": (
        [_finding()],
        {r: _failed(r, "exception: FindingError: RANK101") for r in (0, 1)},
        {0: 1, 1: 1},
        False,
        Word.FINDINGS,
        1,
        (),
    ),
    "one raised, its peer was ended": ([], {1: _failed(1)}, {1: 1}, False, Word.FAILED, 3, (1,)),
    "one raised, its peer aborted": ([], {1: _failed(1)}, {0: _ABORT, 1: 1}, False, Word.FAILED, 3, (1,)),
    "one raised, its peer lost the connection": (
        [],
        {0: _failed(0, _PEER), 1: _failed(1)},
        {0: 1, 1: 1},
        False,
        Word.FAILED,
        3,
        (1,),
    ),
    "both lost the connection": (
        [],
        {r: _failed(r, _PEER) for r in (0, 1)},
        {0: 1, 1: 1},
        False,
        Word.FAILED,
        3,
        (0, 1),
    ),
    "killed, its peer says so": ([], {0: _failed(0, _PEER)}, {0: 1, 1: _KILL}, False, Word.LOST, 4, (1,)),
    "gone before they met, its peer says so": ([], {0: _failed(0, _PEER)}, {0: 0, 1: 0}, False, Word.LOST, 4, (1,)),
    "told to end, its peer says so": ([], {0: _failed(0, _PEER)}, {0: 1, 1: _TERM}, False, Word.LOST, 4, (1,)),
    "gone without a word, its peer says so": ([], {0: _failed(0, _PEER)}, {0: 1}, False, Word.LOST, 4, (1,)),
    "ended while its peer waited": ([], {0: _failed(0, _WAITED)}, {0: 1}, False, Word.FAILED, 3, (0,)),
    "both raised": ([], {0: _failed(0), 1: _failed(1)}, {0: 1, 1: 1}, False, Word.FAILED, 3, (0, 1)),
    "exit 7": ([], {0: _failed(0, "exception: SystemExit: 7", 7), 1: _done(1)}, {0: 7}, False, Word.FAILED, 3, (0,)),
    "os._exit(5)": ([], {1: _done(1)}, {0: 5}, False, Word.FAILED, 3, (0,)),
    "os._exit(0)": ([], {1: _done(1)}, {0: 0, 1: 0}, False, Word.CLEAN, 0, ()),
    "exit handler fails": ([], BOTH, {0: 4}, False, Word.FAILED, 3, (0,)),
    "killed, its peer lost the connection": ([], {0: _failed(0)}, {0: 1, 1: _KILL}, False, Word.LOST, 4, (1,)),
    "killed, its peer was ended": ([], {}, {1: _KILL}, False, Word.LOST, 4, (1,)),
    "killed, its peer aborted": ([], {}, {0: _ABORT, 1: _KILL}, False, Word.LOST, 4, (1,)),
    "killed, the launcher told its peer to end": ([], {}, {0: _TERM, 1: _KILL}, False, Word.LOST, 4, (1,)),
    "aborted, the launcher told its peer to end": ([], {}, {0: _TERM, 1: _ABORT}, False, Word.LOST, 4, (1,)),
    "both aborted": ([], {}, {0: _ABORT, 1: _ABORT}, False, Word.LOST, 4, (0, 1)),
    "told to end": ([], {}, {1: _TERM}, False, Word.LOST, 4, (1,)),
    "crashed": ([_finding()], {0: _done(0)}, {1: _SEGV}, False, Word.LOST, 4, (1,)),
    "aborted": ([], {0: _done(0)}, {1: _ABORT}, False, Word.LOST, 4, (1,)),
    "abort after the end": ([], BOTH, {1: _ABORT}, False, Word.CLEAN, 0, ()),
    "abort after the end ended the peer": ([], {1: _done(1)}, {1: _ABORT}, False, Word.CLEAN, 0, ()),
    "nobody knows": ([], {0: _done(0)}, {}, False, Word.LOST, 4, (1,)),
    "hang": ([_finding()], {}, {}, True, Word.HANG, 4, (0, 1)),
    "hang of one": ([], {0: _done(0)}, {}, True, Word.HANG, 4, (1,)),
    "hang after failure": ([], {0: _failed(0)}, {}, True, Word.HANG, 4, (1,)),
    "interrupted": ([], {0: _failed(0, "interrupted", 130), 1: _done(1)}, {0: -2}, False, Word.FAILED, 3, (0,)),
    "launcher failed": ([], {}, {0: 1, 1: 1}, False, Word.FAILED, 3, (0, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_word(name: str) -> None:
    """The worst that happened decides the word, the exit code and who is named."""
    findings, outcomes, statuses, timed_out, word, code, blamed = CASES[name]
    verdict = judge(findings, outcomes, world=2, timed_out=timed_out, statuses=statuses)
    assert (verdict.word, verdict.exit_code, verdict.blamed) == (word, code, blamed)
    assert set(verdict.ranks) == {0, 1}


def _hang(code: str = "HANG501", rank: int = 1, **evidence: object) -> Finding:
    known = {
        "waiting": {"0": "all_reduce #6 at train.py:41"},
        "missing": {"1": "sleeps, at train.py:33"},
        "hang": "0:1",
    }
    return Finding(code=code, severity=Severity.CRITICAL, title="t", ranks=(rank,), evidence={**known, **evidence})


_BY_HANG = {r: _done(r, "hang: HANG501 t", 4) for r in (0, 1)}
_LATE = {r: _failed(r, _WAITED) for r in (0, 1)}

#: name -> (hang, outcomes, statuses, ended for it, word, exit code)
HANGS = {
    "check has ended it": (_hang(), {}, {}, True, Word.HANG, 4),
    "the time was over": (_hang(), {}, {}, False, Word.HANG, 4),
    "a rank had gone": (_hang("HANG503"), {}, {}, True, Word.LOST, 4),
    "the ranks have left for it": (_hang(), _BY_HANG, {0: 4, 1: 4}, False, Word.HANG, 4),
    "one rank was silent and was killed": (_hang(), {0: _BY_HANG[0]}, {0: 4, 1: _KILL}, False, Word.HANG, 4),
    "the job has waited too long by itself": (_hang(), _LATE, {0: 1, 1: 1}, False, Word.HANG, 4),
    "the rank has raised": (_hang(), {0: _failed(0, _PEER), 1: _failed(1)}, {0: 1, 1: 1}, False, Word.FAILED, 3),
    "check has ended it, for a rank that raised": (
        _hang("HANG503"),
        {0: _BY_HANG[0], 1: _failed(1)},
        {},
        True,
        Word.FAILED,
        3,
    ),
    "it was over": (_hang(ended_after_seconds=8.5), BOTH, {0: 0, 1: 0}, False, Word.CLEAN, 0),
    "all have finished": (_hang(), BOTH, {0: 0, 1: 0}, True, Word.CLEAN, 0),
}


@pytest.mark.parametrize("name", HANGS)
def test_hang(name: str) -> None:
    """One story is told, whoever has noticed it; a hang that is over is a warning."""
    hang, outcomes, statuses, hung, word, code = HANGS[name]
    late = name == "the time was over"
    verdict = judge([hang], outcomes, world=2, timed_out=late, hung=hung, statuses=statuses)
    assert (verdict.word, verdict.exit_code) == (word, code)
    if code == 4:
        assert verdict.blamed == (1,)
        assert verdict.story == (
            "rank 0 waits in all_reduce #6 at train.py:41",
            "rank 1 is missing: sleeps, at train.py:33",
        )
        assert verdict.ranks[1] == "is missing: sleeps, at train.py:33"
        assert json.loads(to_json(verdict, None))["hang"]["code"] == hang.code
    if code == 0:
        assert any("counts as a warning" in note for note in verdict.notes)
        warned = judge([hang], outcomes, world=2, hung=hung, statuses=statuses, fail_on=Severity.WARNING)
        assert warned.word is Word.FINDINGS


@pytest.mark.parametrize(
    "severity, fail_on, code",
    [
        (Severity.WARNING, Severity.WARNING, 1),
        (Severity.ERROR, Severity.CRITICAL, 0),
        (Severity.ERROR, Severity.ERROR, 1),
        (Severity.INFO, Severity.INFO, 0),
    ],
)
def test_threshold(severity: Severity, fail_on: Severity, code: int) -> None:
    """Findings count from `--fail-on` on; `info` never fails a check."""
    assert judge([_finding("X1", severity)], BOTH, world=2, fail_on=fail_on).exit_code == code


def test_gravest_first() -> None:
    """The failing findings are sorted by severity, the others keep their order."""
    findings = [_finding("SYNC203", Severity.ERROR), _finding("SYNC207", Severity.WARNING), _finding()]
    verdict = judge(findings, BOTH, world=2)
    assert [finding.code for finding in verdict.failing] == ["RANK101", "SYNC203"]
    assert [finding.code for finding in verdict.others] == ["SYNC207"]


def test_notes() -> None:
    """What a green verdict does not show is said."""
    verdict = judge([], {0: _done(0, steps=0), 1: _done(1, steps=0)}, world=3, statuses={0: 0, 1: _ABORT, 2: 0})
    text = "\n".join(verdict.notes)
    assert "rank 1 had finished and then died by SIGABRT" in text
    told = with_coverage(verdict, Tally(3).coverage(ended=True))
    assert any(words.startswith("rank 2 left without a report (by os._exit, ") for words in told.unchecked)


def test_json() -> None:
    """The JSON file holds verdict, exit code, findings, ranks and the run."""
    record = json.loads(to_json(judge([_finding()], {0: _done(0)}, world=2, statuses={1: _KILL}), "runs/x"))
    assert (record["verdict"], record["exit_code"], record["run"]) == ("lost rank", 4, "runs/x")
    assert record["findings"][0]["code"] == "RANK101"
    assert record["ranks"]["1"] == {"reason": "died by SIGKILL", "exit_code": None, "steps": None}
    assert record["ranks"]["0"]["steps"] == {"0": 5}


def test_outcome_file() -> None:
    """An outcome is read with its types."""
    outcome = Outcome.from_json({"rank": 1, "reason": "stopped", "exit_code": 0, "steps": {"0": 5}, "time": "x"})
    assert outcome == Outcome(rank=1, reason="stopped", exit_code=0, steps={"0": 5})
    assert Outcome.from_json({"rank": 1, "reason": "x"}).exit_code is None


def test_places() -> None:
    """A hang says where each rank was that has not ended."""
    verdict = judge([], {0: _done(0)}, world=3, timed_out=True, places={1: "in train.py:3 (main)"})
    assert verdict.ranks[0] == "finished"
    assert verdict.ranks[1] == "did not end in time: in train.py:3 (main)"
    assert "nobody knows" in verdict.ranks[2]


def test_who_left_early_is_blamed_and_not_who_missed_it() -> None:
    """A rank that finished after fewer steps than those that lost it; a failure of its own comes first, as ever."""
    verdict = judge([], {0: _failed(0, _PEER), 1: _done(1, steps=4)}, world=2)
    assert (verdict.word, verdict.blamed) == (Word.FAILED, (1,))
    assert verdict.ranks[1] == "left after 4 optimizer steps while others went on: finished"
    assert judge([], {0: _failed(0, _PEER), 1: _done(1, steps=9)}, world=2).blamed == (0,)
    assert judge([], {0: _failed(0), 1: _done(1, steps=4)}, world=2).blamed == (0,)
    assert judge([], {0: _failed(0, _PEER), 1: _done(1, steps=4), 2: _failed(2)}, world=3).blamed == (2,)


@pytest.mark.parametrize(
    "script, outcomes, word, note",
    [
        (0, BOTH, Word.CLEAN, None),
        (1, BOTH, Word.FAILED, "ended with exit status 1"),
        (_KILL, BOTH, Word.LOST, "died by SIGKILL"),
        (1, {r: _failed(r, "exception: FindingError: RANK101") for r in (0, 1)}, Word.FINDINGS, None),
        (1, {0: _done(0), 1: _failed(1)}, Word.FAILED, None),
    ],
)
def test_a_script_that_has_started_its_ranks(
    script: int, outcomes: dict[int, Outcome], word: Word, note: str | None
) -> None:
    """What it does after its ranks counts as well, unless it only passes on how they have ended."""
    verdict = judge((), outcomes, world=2, statuses={0: 0, 1: 0}, script=script)
    assert verdict.word is word
    assert [note in text for text in verdict.notes if "by itself" in text] == ([] if note is None else [True])
