"""The record of what a run looked at: its gaps, their words, and when they are said."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ddpdebug
from ddpdebug.ci.verdict import Outcome, Word, judge, with_coverage
from ddpdebug.monitor.covering import MEET_SECONDS, STEP_SECONDS, Covering
from ddpdebug.schema import coverage
from ddpdebug.schema.coverage import PARTS, Coverage, RankCoverage, Tally, Weight, counted_off, kind_of
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import Covered, Record


def _step(number: int, ranks: int = 2, *, full: bool = True, own: bool = False) -> Step:
    flags = int(Flag.CHECKED) * full + int(Flag.NO_DDP) * own
    rows = {}
    for rank in range(ranks):
        digests: dict[str, Any] = {"params_before_digest": 5 + rank * own, "grads_digest": 7} if full else {}
        rows[rank] = Row(rank=rank, step=number, flags=flags, loss=1.0, **digests)
    return Step(step=number, optimizer=0, world=2, rows=rows)


def _seen(*steps: Step, world: int = 2, **more: Any) -> Coverage:
    tally = Tally(world)
    for step in steps:
        tally.add(step)
    return tally.coverage(more.pop("ranks", None), **{"certain": True, **more})


def test_replicas_that_agree_after_an_average_are_not_each_ranks_own() -> None:
    """Between averages they differ, and that is no reason to advise a wrapper."""
    apart = [_step(number, own=True) for number in range(2)]
    rows = {rank: row._replace(flags=row.flags | Flag.LOCAL_ONLY) for rank, row in _step(2).rows.items()}
    averaged = Step(step=2, optimizer=0, world=2, rows=rows)
    assert _seen(*apart, ended=True).own
    assert not _seen(*apart, averaged, _step(3, own=True), ended=True).own


def test_steps_that_do_not_pair_after_a_join_are_not_compared() -> None:
    """With a DDP too: that no step agreed is said."""
    rows = {rank: row._replace(flags=Flag.LOCAL_ONLY | Flag.CHECKED) for rank, row in _step(0, own=True).rows.items()}
    assert _seen(Step(step=0, optimizer=0, world=2, rows=rows), ended=True).own


def _rank(**values: Any) -> dict[int, RankCoverage]:
    return {0: RankCoverage(**values)}


def test_a_run_that_was_compared_is_complete() -> None:
    """And says since when and until when."""
    known = _seen(_step(0), _step(1), _step(2, full=False))
    assert (known.complete, known.missed, known.compared, known.since, known.until) == (True, (), 2, 0, 1)
    assert (known.joined, known.newest, known.last_checked, known.checked) == (2, 2, False, 2)
    assert known.line() == "2 of 2 ranks compared, steps 0 to 1"
    assert [gap.text for gap in _seen(_step(0), _step(1, full=False), ended=True).gaps] == [
        "the last step that was checked in full is 0 of 1"
    ]


CASES = {
    "nothing": (_seen(ended=True), "steps", "no optimizer step was seen"),
    "by hand": (
        _seen(world=1, ranks=_rank(backwards=50)),
        "steps",
        (
            "no optimizer step was completed, although backward ran 50 times; a step is one of torch.optim's "
            "optimizers, or a change of parameters between a backward and the next forward"
        ),
    ),
    "spawned": (
        _seen(world=1, ranks=_rank(children=2)),
        "steps",
        (
            "no optimizer step was seen: the script has started 2 processes of its own, and they have not joined a "
            "process group"
        ),
    ),
    "off": (
        _seen(world=1, ranks=_rank(made=1, backwards=1)),
        "steps",
        "1 optimizer step was taken, and none could be looked at",
    ),
    "never met": (
        _seen(ranks=_rank(steps=9), apart="rank 1 did not come"),
        "ranks",
        "nothing is compared between the ranks: rank 1 did not come",
    ),
    "lost": (
        _seen(_step(0), _step(1), ranks=_rank(steps=9), apart="lost"),
        "ranks",
        "the ranks were compared until step 1 only: lost",
    ),
    "one of them": (_seen(_step(0, ranks=1)), "ranks", "rank 1 is not compared: no step of it was seen"),
    "never in full": (
        _seen(_step(0, full=False)),
        "ranks",
        "nothing is compared between the ranks: no step was checked in full on two of them",
    ),
    "own": (
        _seen(_step(0, own=True), _step(1, own=True), ended=True),
        "parameters",
        "the ranks' parameters differed in each step (no DDP, local steps or a Join): they are not compared",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_essential_gaps(name: str) -> None:
    """Each has its words, its label and something to do, and is no clean verdict."""
    known, part, text = CASES[name]
    first = known.gaps[0]
    assert (first.part, first.weight, first.text) == (part, Weight.ESSENTIAL, text)
    assert first.action
    assert known.complete is False
    assert Coverage.from_json(known.to_json()) == known


def test_evaluations_without_a_loss_are_a_hint() -> None:
    """Said with what to do; the run is complete all the same, and one rank's loss is everybody's."""
    ranks = {0: RankCoverage(), 1: RankCoverage(rank=1, evaluations=12)}
    known = _seen(_step(0), ranks=ranks, ended=True)
    assert [(gap.text, gap.weight) for gap in known.gaps] == [
        ("no validation loss was seen in 12 evaluations", Weight.NOTE)
    ]
    for word in ("observe(val_loss=...)", "nn loss module", "--validation-loss functions"):
        assert any(word in gap.action for gap in known.gaps)
    assert (known.complete, known.missed) == (True, ())
    assert with_coverage(judge((), _done(), world=2), known, required=True).word is Word.CLEAN
    assert Coverage.from_json(known.to_json()) == known
    assert RankCoverage.from_json({"evaluations": 3}).evaluations == 3
    row = Row(rank=0, step=1, val_loss=0.5)
    told = _seen(_step(0), Step(step=1, optimizer=0, world=2, rows={0: row}), ranks=ranks, ended=True)
    few = _seen(_step(0), ranks={0: RankCoverage(evaluations=1)}, ended=True)
    assert not any("validation" in gap.text for gap in (*told.gaps, *few.gaps))


def test_steps_that_a_graph_replays_are_no_clean_run() -> None:
    """They are counted beside those that were seen, in the line and in the record; the check does not fail for it."""
    known = _seen(_step(0), ranks=_rank(steps=12, replayed=48), ended=True)
    words = "48 of 60 steps were not seen: a CUDA graph replayed them"
    assert [(gap.part, gap.weight, gap.text) for gap in known.missed] == [("steps", Weight.PART, words)]
    assert (known.complete, known.line()) == (False, f"not checked: {words}")
    assert Coverage.from_json(known.to_json()) == known
    verdict = with_coverage(judge((), _done(), world=2), known)
    assert (verdict.word, verdict.exit_code, verdict.unchecked) == (Word.UNCHECKED, 0, (words,))


@pytest.mark.parametrize("part", ["message:fact", "exchange:steps", "patch:clip_grad_norm", "sinks", "device", "row"])
def test_what_judges_less_is_no_clean_run(part: str) -> None:
    """A part that is no probe, without which findings or rows are missing."""
    assert with_coverage(judge((), _done(), world=2), _seen(_step(0), ranks=_rank(off={part: "x"}))).unchecked


def test_one_rank_is_not_checked_unless_asked_for() -> None:
    """There is nothing to compare: a launcher that started one rank too few would stay green."""
    known, alone = _seen(_step(0, ranks=1), world=1, ranks=_rank(steps=1), ended=True), judge((), _done(1), world=1)
    verdict = with_coverage(alone, known)
    assert (verdict.word, verdict.exit_code) == (Word.UNCHECKED, 1)
    assert verdict.unchecked[0].startswith("nothing is compared between ranks: there was one; start several with")
    verdict = with_coverage(alone, known, ranks=1)
    assert (verdict.word, verdict.exit_code, verdict.unchecked) == (Word.CLEAN, 0, ())
    assert verdict.notes == ("one rank, as --nproc-per-node 1 asks for: nothing was compared between ranks",)
    failed = with_coverage(judge((), {}, world=1, statuses={0: 1}), known)
    assert (failed.word, failed.exit_code, failed.unchecked) == (Word.FAILED, 3, ())
    two = with_coverage(judge((), _done(), world=2), _seen(_step(0)))
    assert (two.word, two.exit_code) == (Word.CLEAN, 0)


def test_ranks_without_a_report_are_no_clean_run() -> None:
    """What they saw last may be missing: the check says so, and does not fail for a script that ends by os._exit."""
    some = with_coverage(judge((), _done(1), world=2, statuses={0: 0, 1: 0}), _seen(_step(0)))
    assert (some.word, some.exit_code) == (Word.UNCHECKED, 0)
    assert some.unchecked == (
        "rank 1 left without a report (by os._exit, or out of reach of rank 0): what was seen last may be missing",
    )
    none = with_coverage(judge((), {}, world=2, statuses={0: 0, 1: 0}), _seen(_step(0)))
    assert (none.word, none.exit_code) == (Word.UNCHECKED, 0)
    unseen = with_coverage(judge((), {}, world=2, statuses={0: 0, 1: 0}), CASES["nothing"][0])
    assert (unseen.word, unseen.exit_code) == (Word.UNCHECKED, 1)


def test_parts_that_are_off() -> None:
    """A probe that failed is a part; what only explains is a note; what is left out on purpose too."""
    off = {"probe:numerics": "ValueError: x", "forensics:replay": "no", "probe:new-one": "y"}
    known = _seen(_step(0), ranks=_rank(off=off, left_out={"on DDP's ignore list": 2}, unwatched={"DTensor": 3}))
    texts = {gap.text: (gap.part, gap.weight) for gap in known.gaps}
    assert texts == {
        "3 parameters not compared: DTensor": ("parameters", Weight.PART),
        "probe:numerics is off on rank 0: ValueError: x": ("numerics", Weight.PART),
        "probe:new-one is off on rank 0: y": ("forward", Weight.PART),
        "2 parameters not compared: on DDP's ignore list": ("parameters", Weight.NOTE),
        "forensics:replay is off on rank 0: no": ("other", Weight.NOTE),
    }
    assert counted_off(known) == {"parameters": 1, "numerics": 1, "forward": 1}
    assert counted_off(known).keys() <= set(PARTS)


@pytest.mark.smoke
def test_every_probe_is_known_to_the_coverage() -> None:
    """What the code runs a probe under says what is not looked at while it is off, and nothing else is listed."""
    used = {
        node.value
        for path in Path(ddpdebug.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"probe:[\w-]+", node.value)
    }
    assert used == set(coverage._KINDS)
    assert {kind_of(part)[0] for part in used} <= set(PARTS)
    assert kind_of("probe:numerics-loss") == ("numerics", Weight.PART)


@pytest.mark.parametrize("record", [None, 3, {}, {"world": "x"}, {"world": 2, "ranks": [1]}, {"world": 1, "never": 3}])
def test_damaged_records_are_none(record: object) -> None:
    """They come from a file that anybody may have written."""
    assert Coverage.from_json(record) is None


def _done(world: int = 2) -> dict[int, Outcome]:
    return {rank: Outcome(rank=rank, reason="finished", exit_code=0, steps={"0": 3}) for rank in range(world)}


@pytest.mark.parametrize("required, code", [(False, 0), (True, 1)])
def test_verdict(required: bool, code: int) -> None:
    """Not checked is neither clean nor a failure, unless it is required; findings and failures come first."""
    clean = judge((), _done(), world=2)
    missed = with_coverage(clean, CASES["never met"][0], required=required)
    assert (missed.word, missed.exit_code) == (Word.UNCHECKED, code)
    assert missed.title == "no findings, but not checked"
    assert missed.unchecked[0].startswith("nothing is compared between the ranks: rank 1 did not come; start every")
    unknown = with_coverage(clean, None, required=required)
    assert (unknown.word, unknown.exit_code) == (Word.UNCHECKED, 1)
    assert with_coverage(clean, CASES["own"][0], required=required).exit_code == code
    averaged = _seen(_step(0, own=True), _step(1), ended=True)  # now and then
    for compared in (_seen(_step(0)), averaged):
        assert with_coverage(clean, compared, required=required).word is Word.CLEAN
    failed = judge((), {}, world=2, statuses={0: 1, 1: 1})
    assert with_coverage(failed, CASES["never met"][0], required=required).exit_code == 3


@pytest.mark.parametrize("name", ["nothing", "by hand", "spawned", "off"])
def test_nothing_seen_is_no_green_check(name: str) -> None:
    """A job that stops attaching, or starts what is not seen, does not stay green for ever.

    Where a rank's own account tells of steps, their rows were lost, and that is no proof of nothing.
    """
    for steps, code in (({}, 1), ({"0": 0}, 1), ({"0": 5}, 0)):
        outcomes = {rank: replace(outcome, steps=steps) for rank, outcome in _done().items()}
        verdict = with_coverage(judge((), outcomes, world=2), CASES[name][0], ranks=1)
        assert (verdict.word, verdict.exit_code) == (Word.UNCHECKED, code)


def test_updates_by_hand_are_said() -> None:
    """They take nothing from the words *no findings*; a script that also has an optimizer hears nothing."""
    by_hand = _seen(_step(0), world=1, ranks=_rank(steps=9, by_hand=9))
    assert [gap.text for gap in by_hand.gaps if "by hand" in gap.text] == [
        (
            "parameters are updated by hand: a step ends where the next forward begins, and learning rate, optimizer "
            "state and the order of the calls are not looked at"
        )
    ]
    assert by_hand.complete is not False
    assert not [gap for gap in _seen(_step(0), world=1, ranks=_rank(steps=9, by_hand=2)).gaps if "hand" in gap.text]


class _Run:
    """A rank whose time passes by itself."""

    def __init__(self, world: int = 2, rank: int = 0, *, sinks: bool = True) -> None:
        self.now, self.steps = 1000.0, 0
        self.records: list[Covered] = []
        account = lambda: RankCoverage(rank=rank, steps=self.steps)  # noqa: E731
        self.covering = Covering(account, self._write, lambda _: None, quiet=False, clock=lambda: self.now)
        self.store = {}
        self.covering.begin(rank, world, self, "p")
        if sinks:
            self.covering.opened()

    def _write(self, record: Record) -> None:
        assert isinstance(record, Covered)
        self.records.append(record)

    def set(self, key: str, value: str) -> None:
        self.store[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.store for key in keys)

    def get(self, key: str) -> bytes:
        return self.store[key]

    def add(self, key: str, amount: int) -> int:
        self.store[key] = self.store.get(key, 0) + amount
        return self.store[key]

    def after(self, seconds: float, steps: int | None = None) -> tuple[str, ...]:
        """Let time pass and look; return what is said."""
        self.now += seconds
        self.steps = self.steps if steps is None else steps
        self.covering.look()
        return self.records[-1].say


def test_said_once_when_it_is_certain() -> None:
    """Not at once: the others may be on the way. Not twice. That they have come later is said too."""
    run = _Run()
    run.covering.meeting()
    run.covering.missing = (1,)
    assert run.after(1, steps=1) == ()
    assert run.records[-1].coverage.complete is None
    (line,) = run.after(STEP_SECONDS)
    assert line.startswith("nothing is compared between the ranks: rank 1 did not come (started without ddpdebug?); ")
    assert run.records[-1].coverage.complete is False
    assert run.after(5, steps=9) == ()
    run.covering.ticked(2)
    run.covering.judged(_step(9))
    assert run.after(1, steps=10) == ("the ranks are compared now (2 of 2)",)


def test_said_before_the_first_step() -> None:
    """A job that waits for long before it steps hears it in its first minute."""
    run = _Run()
    run.covering.connecting()
    assert run.after(1) == ()
    (line,) = run.after(MEET_SECONDS)
    assert "cannot connect (a firewall between them?)" in line


def test_lost_in_the_middle() -> None:
    """From then on the ranks are compared until that step; the metric is 0."""
    run = _Run()
    run.covering.ticked(2)
    run.covering.judged(_step(4))
    assert run.after(1, steps=5) == run.after(STEP_SECONDS, steps=5) == ()
    assert run.records[-1].coverage.compared_now == 2
    run.covering.lost("RuntimeError: [x] Connection closed by peer [127.0.0.1]:1")
    (line,) = run.after(2, steps=9)
    assert line.startswith("the ranks were compared until step 4 only: the connection to them was lost ([x] Connection")
    assert run.records[-1].coverage.compared_now == 0


def test_ranks_that_fall_silent() -> None:
    """The group is not dead, but nobody answers while this rank trains on."""
    run = _Run()
    run.covering.ticked(2)
    run.covering.judged(_step(4))
    run.after(0.5, steps=5)
    run.after(STEP_SECONDS, steps=5)
    assert "have not answered for 60 s" in run.after(61, steps=90)[0]
    run.covering.ticked(2)
    run.covering.judged(_step(90))
    assert run.after(1, steps=91) == ("the ranks are compared now (2 of 2)",)


def test_the_end_of_a_short_run_is_certain() -> None:
    """The last record is whole; the terminal's last line says it, so no other one does."""
    run = _Run()
    run.after(1, steps=3)
    run.covering.close()
    assert (run.records[-1].coverage.complete, run.records[-1].say, run.records[-1].keep) == (False, (), True)


def test_one_rank_of_a_node_speaks_where_rank_0_does_not_hear(capsys: pytest.CaptureFixture[str]) -> None:
    """The first that has looked for the others; nobody asks a store later, when it may be gone."""
    run = _Run(rank=1, sinks=False)
    run.covering.meeting()
    run.after(1, steps=1)
    run.after(STEP_SECONDS)
    err = capsys.readouterr().err
    assert err.startswith("ddpdebug: rank 1: nothing is compared between the ranks: ")
    assert err.count("\n") == 1
    other = _Run(rank=2, world=3, sinks=False)
    other.store = run.store
    other.covering.meeting()
    run.store = other.store = None  # type: ignore[assignment]
    other.after(1, steps=1)
    other.after(STEP_SECONDS)
    assert capsys.readouterr().err == ""
