"""What people see in their terminal and in their logs."""

from __future__ import annotations

import io
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.schema.coverage import Tally
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Digest, Flag, Row
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import Step
from ddpdebug.sinks import Covered, FindingRaised, RunEnded, RunStarted, Saved, StepJudged, Trouble, Waiting
from ddpdebug.sinks.terminal import Terminal

STARTED = RunStarted(
    run_id="r1",
    rank=0,
    world=4,
    directory=Path("ddpdebug-runs/r1"),
    config={"metrics_port": 9400},
    versions={},
    metrics_url="http://127.0.0.1:9400/metrics",
)
FINDING = Finding(
    code="RANK101",
    severity=Severity.CRITICAL,
    title="parameters differ between ranks",
    step=57,
    ranks=(2,),
    subject=("layers.3.fc.weight",),
    phase="outside-optimizer",
    location="train.py:88",
    evidence={"differing": 1},
    causes=["an edit on one rank", "a flipped bit"],
    actions=["look at the named line"],
    id="RANK101-1",
)
FINISHED = RunEnded(reason="finished", exit_code=0, steps={})


class Recording(io.StringIO):
    """A stream that remembers its writes one by one."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, *, tty: bool = False) -> None:
        super().__init__()
        self.writes: list[str] = []
        self._tty = tty

    def isatty(self) -> bool:
        """Pretend."""
        return self._tty

    def write(self, text: str) -> int:
        """Remember the write."""
        self.writes.append(text)
        return super().write(text)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the terminal's kind independent of where the tests run."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def judged(step: int, *digests: int, optimizer: int = 0, flags: Flag = Flag.CHECKED, **fields: Any) -> StepJudged:
    """Build a step in which the ranks have these parameters."""
    rows = {
        rank: Row(rank=rank, step=step, flags=int(flags), loss=2.5, params_after_digest=Digest(digest), **fields)
        for rank, digest in enumerate(digests)
    }
    made = Step(step=step, optimizer=optimizer, world=len(rows), rows=rows)
    return StepJudged(step=made, interval=5, overhead_ratio=0.0083, overhead_of_run=0.0083)


def test_a_run_that_a_hub_shows_begins_with_its_page() -> None:
    """In the place of its directory, on the same one line."""
    stream = Recording()
    config = {**STARTED.config, "hub": "http://hub:8765/"}
    Terminal(0, stream).write(replace(STARTED, run_id="b71f2e", time="2026-11-21T08:39:20Z", config=config))
    assert stream.getvalue() == "ddpdebug: watching 4 ranks · http://hub:8765/runs/20261121T083920Z-b71f2e\n"


def test_metrics_have_a_line_where_somebody_has_asked_for_them() -> None:
    """Their address, and what Prometheus has to know."""
    stream = Recording()
    Terminal(0, stream).write(replace(STARTED, config={**STARTED.config, "shows_metrics": True}))
    first, second = stream.getvalue().splitlines()
    assert "http://127.0.0.1:9400/metrics" in first
    assert "http_sd_configs" in second


def test_a_log_gets_plain_lines() -> None:
    """No escape codes, a line per item."""
    stream = Recording()
    terminal = Terminal(0, stream)
    for record in (STARTED, FindingRaised(finding=FINDING), Trouble(part="exchange", message="a rank\nis gone")):
        terminal.write(record)
    assert stream.getvalue() == (
        "ddpdebug: watching 4 ranks · ddpdebug-runs/r1\n"
        "ddpdebug: critical RANK101: parameters differ between ranks\n"
        "  where     step 57 · rank 2 · outside-optimizer · train.py:88\n"
        "  what      layers.3.fc.weight\n"
        "  evidence  differing: 1\n"
        "  perhaps   an edit on one rank\n"
        "  next      look at the named line\n"
        "            ddpdebug explain RANK101\n"
        "ddpdebug: exchange has switched itself off: a rank\\nis gone (the job goes on)\n"
    )


def test_each_output_is_one_write_that_begins_on_a_cleared_line() -> None:
    """So that tqdm's bar and other ranks' lines do not get into it."""
    stream = Recording(tty=True)
    terminal = Terminal(0, stream)
    terminal.write(STARTED)
    terminal.write(FindingRaised(finding=FINDING))
    assert len(stream.writes) == 2
    assert all(text.startswith("\r\x1b[K") and text.endswith("\n") for text in stream.writes)
    assert "\x1b[1" in stream.writes[1]
    shown = re.sub(r"\x1b\[[0-9;]*[mK]", "", stream.writes[1])
    assert "RANK101" in shown
    assert "  where     step 57 · rank 2 · outside-optimizer · train.py:88\n" in shown


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the clearing of the line remains."""
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Recording(tty=True)
    Terminal(0, stream).write(FindingRaised(finding=FINDING))
    assert "\x1b" not in stream.getvalue().removeprefix("\r\x1b[K")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Editors run shells in one."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Recording(tty=True)
    Terminal(0, stream).write(FindingRaised(finding=FINDING))
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("tty", [True, False])
def test_names_from_the_job_cannot_control_the_terminal(tty: bool) -> None:
    """Escape sequences are escaped, markup is text."""
    evil = "[red]w\x1b[2J\n[/red]"
    finding = replace(FINDING, subject=(evil,), location=evil, title=evil, evidence={evil: {"0": evil}}, causes=[evil])
    stream = Recording(tty=tty)
    terminal = Terminal(0, stream)
    terminal.write(FindingRaised(finding=finding))
    terminal.write(Trouble(part=evil, message=evil))
    terminal.write(replace(FINISHED, reason=evil))
    assert "\x1b[2J" not in stream.getvalue()
    assert r"[red]w\x1b[2J\n[/red]" in stream.getvalue()


def test_parts_that_are_off_have_a_line_for_each_cause() -> None:
    """What follows from another part, and the same cause in other parts and ranks, is said in files only."""
    stream = Recording()
    terminal = Terminal(0, stream)
    for part, message in (
        ("probe:a", "ValueError: x"),
        ("probe:b", "it needs probe:a, which is off"),
        ("probe:c", "ValueError: x"),
        ("probe:a of rank 1", "ValueError: x"),
        ("probe:d", "KeyError: 'y'"),
        ("device", "the device has failed, and nothing is read from it any more (RuntimeError: CUDA error: z)"),
    ):
        terminal.write(Trouble(part=part, message=message))
    assert stream.getvalue().splitlines() == [
        "ddpdebug: probe:a has switched itself off: ValueError: x (the job goes on)",
        "ddpdebug: probe:d has switched itself off: KeyError: 'y' (the job goes on)",
        "ddpdebug: the device has failed, and nothing is read from it any more (RuntimeError: CUDA error: z)",
    ]


def test_a_stream_without_unicode_still_gets_everything() -> None:
    """Separators become ASCII, the rest is escaped."""
    stream = Recording()
    stream.encoding = "ascii"  # type: ignore[misc]
    Terminal(0, stream).write(FindingRaised(finding=replace(FINDING, subject=("größe",))))
    assert stream.getvalue().isascii()
    assert "step 57 - rank 2" in stream.getvalue()
    assert r"gr\xf6\xdfe" in stream.getvalue()


def test_only_rank_0_prints() -> None:
    """Sixty-four ranks share one terminal."""
    stream = Recording()
    for record in (STARTED, judged(0, 1, 2), FindingRaised(finding=FINDING), FINISHED):
        Terminal(1, stream).write(record)
    assert stream.getvalue() == ""


def test_a_finding_is_shown_once_and_new_evidence_when_it_is_found() -> None:
    """Later occurrences are quiet; the first differing element arrives later and is worth a line."""
    stream = Recording()
    terminal = Terminal(0, stream)
    terminal.write(FindingRaised(finding=FINDING))
    terminal.write(FindingRaised(finding=FINDING.seen_again(58), new=False))
    assert len(stream.writes) == 1
    values = {"index": [4, 17], "element_of": "fc.weight", "values": {"0": 0.5, "2": 1.0}, "values_at_step": 61}
    located = replace(FINDING, evidence={"differing": 1, **values})
    for _ in range(2):
        terminal.write(FindingRaised(finding=located, new=False))
    assert stream.writes[1:] == [
        "ddpdebug: RANK101 of step 57: fc.weight[4, 17]: rank 0 = 0.5, rank 2 = 1 after step 61\n"
    ]


def test_an_element_that_differs_by_a_bit_is_called_a_bit_flip() -> None:
    """With the cause that belongs to it."""
    stream = Recording()
    terminal = Terminal(0, stream)
    terminal.write(FindingRaised(finding=FINDING))
    bits = {"index": [4], "values": {"0": 0.5, "2": 1.0}, "flipped_bits": [23], "dtype": "float32"}
    terminal.write(
        FindingRaised(finding=replace(FINDING, evidence=bits, causes=["`flipped bits`: the memory"]), new=False)
    )
    assert "bit 23 of float32 is flipped" in stream.writes[-1]
    assert stream.writes[-1].endswith("; the memory\n")


@pytest.mark.parametrize("tty", [True, False])
def test_a_consequence_alone_is_not_worth_a_block(tty: bool) -> None:
    """It is printed neither when it arrives nor together with the element that is found later."""
    stream = Recording(tty=tty)
    terminal = Terminal(0, stream)
    terminal.write(FindingRaised(finding=FINDING))
    follows = {**FINDING.evidence, "consequences": ["RANK103 since step 58"]}
    terminal.write(FindingRaised(finding=replace(FINDING, evidence=follows), new=False))
    assert len(stream.writes) == 1
    more = {"consequences": ["RANK103 since step 58", "RANK102 since step 58"], "values": {"0": 1.0, "2": 2.0}}
    terminal.write(FindingRaised(finding=replace(FINDING, evidence=more), new=False))
    assert len(stream.writes) == 2
    assert "consequences" not in stream.writes[1]
    assert "values: rank 0 = 1, rank 2 = 2" in stream.writes[1]


def test_a_finding_that_grows_is_the_same_finding() -> None:
    """Further ranks and parameters of a cause are not told as news about its values."""
    stream = Recording()
    terminal = Terminal(0, stream)
    first = replace(FINDING, evidence={"values": {"0": 1.0, "2": 2.0}})
    terminal.write(FindingRaised(finding=first))
    terminal.write(FindingRaised(finding=replace(first, ranks=(1, 2), subject=(*first.subject, "b")), new=False))
    assert len(stream.writes) == 1


@pytest.mark.parametrize("infinite", [math.inf, "inf"])  # in memory, and as read back from findings.jsonl
def test_values_that_are_not_finite_are_shown(infinite: object) -> None:
    """A corrupted weight is often one of them."""
    stream = Recording()
    values = {"0": 0.5, "1": infinite, "2": math.nan, "3": -math.inf}
    Terminal(0, stream).write(FindingRaised(finding=replace(FINDING, evidence={"values": values})))
    assert "  evidence  values: rank 0 = 0.5, rank 1 = inf, rank 2 = nan, rank 3 = -inf\n" in stream.getvalue()


def test_a_flood_of_findings_is_cut() -> None:
    """The run directory has them all."""
    stream = Recording()
    terminal = Terminal(0, stream)
    for i in range(40):
        terminal.write(FindingRaised(finding=replace(FINDING, step=i, id=f"RANK101-{i}")))
    assert len(stream.writes) == 21
    assert stream.writes[-1] == "ddpdebug: 20 findings shown, the others are in the run directory only\n"


def summary(
    *records: StepJudged | FindingRaised | Saved, started: RunStarted = STARTED, ended: RunEnded = FINISHED
) -> str:
    """Return the last line of a run."""
    stream = Recording()
    terminal = Terminal(0, stream)
    for record in (started, *records, ended):
        terminal.write(record)
    return stream.writes[-1]


def test_the_last_line_says_what_was_compared() -> None:
    """Steps, agreement, cost and how often the full check ran."""
    steps = [judged(i, 5, 5) if i % 5 == 0 else judged(i, 0, 0) for i in range(20)]
    assert summary(*steps) == (
        "ddpdebug: no findings · 20 steps · the ranks agreed in all 4 that were compared · "
        "the last step's parameters were not compared · overhead 0.83 % · full check every 5 steps\n"
    )


def test_the_last_line_counts_a_step_that_was_found_to_differ_at_the_end() -> None:
    """Nothing is said to agree that was found to differ; local training differs on purpose."""
    for flags, said in ((0, True), (int(Flag.LOCAL_ONLY), False)):
        own = {"flags": flags, "foreign_params_digest": "00"}
        rows = {"0": {**own, "params_after_digest": "05"}, "1": {**own, "params_after_digest": "06"}}
        last = Saved(kind="last_state", payload={"optimizer": 0, "step": 1, "rows": rows})
        assert ("disagreed in 1 of the 2 that were compared" in summary(judged(0, 5, 5), judged(1, 0, 0), last)) is said


def test_what_the_broadcast_repairs_is_said_when_it_matters() -> None:
    """RANK111 stands in the last line alone, unless ranks are found to differ in something else."""
    repaired = replace(FINDING, code="RANK111", severity=Severity.INFO, id="RANK111-1")
    for others, said in (
        ([], False),
        ([replace(FINDING, code="SYNC207", id="SYNC207-1")], False),
        ([replace(FINDING, code="RANK110", severity=Severity.INFO, id="RANK110-1")], False),
        ([replace(FINDING, code="RANK107", severity=Severity.WARNING, id="RANK107-1")], True),
    ):
        stream = Recording()
        terminal = Terminal(0, stream)
        for record in (STARTED, *(FindingRaised(finding=f) for f in (repaired, *others)), FINISHED):
            terminal.write(record)
        assert ("ddpdebug: info RANK111" in stream.getvalue()) is said, others
        assert "1 info (RANK111)" in stream.writes[-1] or "RANK110" in stream.writes[-1]


def test_the_last_line_counts_a_step_once() -> None:
    """One that differed, and whose parameters were compared once more at the end."""
    rows = {str(r): {"flags": 0, "params_after_digest": f"0{r + 5}", "foreign_params_digest": "00"} for r in range(2)}
    last = Saved(kind="last_state", payload={"optimizer": 0, "step": 1, "rows": rows})
    assert "disagreed in 1 of the 2 that were compared" in summary(judged(0, 5, 5), judged(1, 5, 6), last)


def test_the_last_line_counts_the_steps_of_an_optimizer_that_is_made_later() -> None:
    """Its steps go on with the run's numbers, and its last ones may have had no rows."""
    steps = [judged(step, 5, 5, optimizer=step // 2) for step in range(6)]
    assert "· 8 steps ·" in summary(*steps, ended=replace(FINISHED, steps={0: 2, 1: 4, 2: 8}))


def test_the_last_line_says_that_ranks_train_parameters_of_their_own() -> None:
    """Stages of a pipeline, experts: where no DDP is involved and nothing was found of ranks."""
    own = [judged(i, 5, 6, flags=Flag.CHECKED | Flag.NO_DDP) for i in range(4)]
    tally = Tally(2)
    for record in own:
        tally.add(record.step)
    covered = Covered(coverage=tally.coverage(ended=True))
    told = summary(*own, covered)
    assert "no findings" not in told
    assert "4 steps · not checked: the ranks' parameters differed in each step (no DDP, local steps or a Join)" in told
    assert "disagreed in 4 of the 4 that" in summary(*own, covered, FindingRaised(finding=FINDING))


def test_the_last_line_takes_back_what_averaging_explains() -> None:
    """Replicas that train apart disagree only until they are seen to be averaged."""
    apart = [judged(i, 5, 6, flags=Flag.UNSYNCED_BACKWARD) for i in range(4)]
    assert "disagreed in 4 of the 4 that" in summary(*apart)
    meant = judged(4, 5, 6, flags=Flag.UNSYNCED_BACKWARD | Flag.LOCAL_ONLY)
    assert "replicas that may differ, between averages or after a Join, are not compared there" in summary(
        *apart, meant
    )
    assert "disagreed" not in summary(*apart, meant)


@pytest.mark.parametrize(("digests", "said"), [(("05", "05"), False), (("05", "00"), True)])
def test_the_last_line_says_whether_the_last_step_was_compared(digests: tuple[str, str], *, said: bool) -> None:
    """At the end, where all ranks could tell what the step has left."""
    rows = {
        str(rank): {"flags": 0, "params_after_digest": value, "foreign_params_digest": "00"}
        for rank, value in enumerate(digests)
    }
    last = Saved(kind="last_state", payload={"optimizer": 0, "step": 1, "rows": rows})
    assert ("last step's parameters were not compared" in summary(judged(0, 5, 5), judged(1, 0, 0), last)) is said


@pytest.mark.parametrize(
    "fields", [{"gathered_values": 7}, {f"reduced_sum_{slot}": 0.5 for slot in range(8)}], ids=["gathers", "reductions"]
)
def test_shards_are_compared_by_what_is_gathered_or_reduced(fields: dict[str, Any]) -> None:
    """Although no rank holds what another one holds."""
    text = summary(judged(0, 0, 0, flags=Flag.SHARDED, **fields))
    assert "the ranks agreed in all 1 that were compared · sharded parameters have no replicas to compare" in text
    assert "the last step's parameters" not in text


def test_the_last_line_counts_findings_by_severity() -> None:
    """The gravest first, with the file that holds them."""
    warning = replace(FINDING, code="SYNC207", severity=Severity.WARNING, id="SYNC207-1")
    raised = [FindingRaised(finding=f) for f in (warning, FINDING, replace(FINDING, step=60, id="RANK101-2"))]
    assert summary(judged(0, 5, 6), *raised) == (
        "ddpdebug: 2 critical (RANK101 x2), 1 warning (SYNC207) · 1 step · "
        "the ranks disagreed in 1 of the 1 that were compared · "
        "overhead 0.83 % · full check every 5 steps · ddpdebug-runs/r1/findings.jsonl\n"
    )


def test_nothing_is_called_clean_that_was_not_checked() -> None:
    """No step, no comparison, or one rank only."""
    assert summary() == "ddpdebug: no optimizer step was seen, so nothing was checked\n"
    assert "no findings" not in summary(judged(0, 0, 0))
    assert "nothing was compared between the ranks" in summary(judged(0, 0, 0))
    assert "nothing was compared between the ranks" in summary(judged(0, 0, 0, flags=Flag.SHARDED))
    alone = replace(STARTED, world=1)
    assert "no findings · 1 step · one rank, nothing to compare" in summary(judged(0, 5), started=alone)
    assert summary(ended=replace(FINISHED, reason="signal SIGTERM")).startswith(
        "ddpdebug: signal SIGTERM · no optimizer"
    )


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_the_status_goes_to_the_title_and_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of the terminal is touched, and the old title comes back at the end."""
    monkeypatch.setenv("TERM", "xterm-256color")
    stream, clock = Recording(tty=True), Clock()
    terminal = Terminal(0, stream, status_seconds=5, clock=clock)
    for step in range(10):
        clock.now = float(step)
        terminal.write(judged(step, 5, 5))
    titles = [f"\x1b]2;ddpdebug: step {s} · loss 2.5 · no findings\x07" for s in (0, 5)]
    assert stream.writes == [f"\x1b[22;2t{titles[0]}", titles[1]]
    terminal.write(FINISHED)
    assert stream.writes[-1].endswith("\n\x1b[23;2t")


def test_the_status_shows_a_loss_that_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in a row means unknown, unless its flag says that the loss is NaN."""
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Recording(tty=True)
    for flags in (0, int(Flag.LOSS_NONFINITE)):
        row = Row(step=3, loss=math.nan, flags=flags)
        step = Step(step=3, optimizer=0, world=1, rows={0: row})
        Terminal(0, stream).write(StepJudged(step=step))
    titles = [f"\x1b]2;ddpdebug: step 3{loss} · no findings\x07" for loss in ("", " · loss nan")]
    assert stream.writes == [f"\x1b[22;2t{title}" for title in titles]


@pytest.mark.parametrize("tty, term, on", [(True, "xterm", False), (False, "xterm", True), (True, "linux", True)])
def test_there_are_terminals_without_a_status(tty: bool, term: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log, a console without a window, and whoever asks for none."""
    monkeypatch.setenv("TERM", term)
    stream = Recording(tty=tty)
    Terminal(0, stream, status=on).write(judged(0, 5, 5))
    assert stream.writes == []


def test_a_large_overhead_is_written_out() -> None:
    """Very short steps of a test cost several times themselves."""
    assert "overhead 430 %" in summary(replace(judged(0, 5, 5), overhead_ratio=4.3, overhead_of_run=4.3))


def test_the_overhead_of_a_short_run_is_said_in_seconds() -> None:
    """A share of next to nothing says nothing."""
    text = summary(replace(judged(0, 5, 5), overhead_of_run=10.4, overhead_ratio=10.4, overhead_seconds=0.83))
    assert "overhead 0.8 s · " in text
    assert "1040 %" not in text


@pytest.mark.parametrize(("seconds", "text"), [(4.24, "overhead 4.2 s\n"), (424.0, "overhead 80 %\n")])
def test_the_overhead_of_a_short_run_is_seconds(seconds: float, text: str) -> None:
    """Who tries a toy first would take a share for what a real run pays."""
    one = replace(judged(0, 5, 5), overhead_of_run=0.8, overhead_seconds=seconds, interval=1)
    assert summary(one).endswith(text)


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_finding_has_eight_lines_at_most(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much there is to say of it, and nothing in it is a Python list or dict."""
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((columns, 24)))
    long = "an in-place edit (`p.data.mul_`, normalisation, an EMA swap that is not swapped back) on some ranks " * 3
    evidence = {"groups": [[0, 1]], "changed_on": [1], "layers": {"a": {"b": 1.0}}, "error": long, "c": {"d": [1]}}
    finding = replace(
        FINDING, causes=[long, long], actions=[long], subject=("a.b",) * 9, evidence={**evidence, "bundle": "bundles/x"}
    )
    for tty in (True, False):
        stream = Recording(tty=tty)
        stream.fileno = lambda: 1  # type: ignore[method-assign]
        Terminal(0, stream).write(FindingRaised(finding=finding))
        assert stream.getvalue().count("\n") <= (8 if columns > 40 or not tty else 10)
        assert not re.search(r"\{|\[\[|=\[|\['", stream.getvalue())
        assert "explain RANK101" in stream.getvalue()


def test_what_the_run_goes_on_with_is_told_beside_what_its_start_took() -> None:
    """The start of a short job says little about a long one; what was not checked in each step is not said to be."""
    text = summary(replace(judged(0, 5, 5), overhead_of_run=0.3, overhead_ratio=0.04, interval=64))
    assert "overhead 30 %, 4 % lately · full check every 64 steps" in text
    sampled = replace(judged(0, 5, 5), interval=64)
    text = summary(sampled, replace(judged(1, 5, 5), overhead_of_run=0.3, interval=1))
    assert "overhead 30 %\n" in text


def test_an_unknown_overhead_is_not_printed() -> None:
    """NaN says nothing to a person."""
    step = replace(judged(0, 5, 5), overhead_of_run=math.nan, interval=1)
    assert summary(step) == "ddpdebug: no findings · 1 step · the ranks agreed in all 1 that were compared\n"


HANG = Finding(
    code="HANG501",
    severity=Severity.CRITICAL,
    title="a rank stopped advancing while others wait",
    step=5,
    ranks=(1,),
    phase="data",
    location="/home/me/train.py:33",
    evidence={
        "waiting": {"0,2-3": "all_reduce #6 of float32 [8] at /home/me/train.py:41"},
        "missing": {"1": "waits for a lock, at /home/me/train.py:33 (get): lock.acquire()"},
        "collectives_so_far": {"0": 6, "1": 5, "2": 6, "3": 6},
        "waited_seconds": 8.6,
        "stacks": {
            "0,2-3": [
                "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py:3 (all_reduce)",
                "/home/me/train.py:41 (main)",
                "/home/me/train.py:60 (<module>)",
            ],
            "1": [f"/home/me/data.py:{n} (get)" for n in range(33, 40)],
        },
        "hang": "0:1",
    },
    causes=["a deadlock", "a blocked pipeline"],
    actions=["give locks a timeout"],
    id="HANG501-1",
)


def told(*findings: Finding, speaks: int = 0) -> str:
    """Return what is printed of a hang as more and more becomes known of it."""
    stream = Recording()
    terminal = Terminal(0, stream, speaks=speaks)
    terminal.write(STARTED)
    stream.truncate(0)
    stream.seek(0)
    for i, finding in enumerate(findings):
        terminal.write(FindingRaised(finding=finding, new=i == 0))
    return stream.getvalue()


def test_a_hang_is_told_in_the_order_in_which_people_ask() -> None:
    """Who is missing and where, who waits in what, and the innermost of the user's own lines; no internal number."""
    assert told(HANG) == (
        "ddpdebug: critical HANG501: a rank stopped advancing while others wait\n"
        "  where     step 5 · rank 1 · data · /home/me/train.py:33\n"
        "  missing   rank 1: waits for a lock, at /home/me/train.py:33 (get): lock.acquire()\n"
        "  waits     ranks 0,2-3: all_reduce #6 of float32 [8] at /home/me/train.py:41\n"
        "            for 9 s when this was found\n"
        "  perhaps   a deadlock\n"
        "  next      give locks a timeout\n"
        "            ddpdebug explain HANG501\n"
    )


def test_different_calls_stand_below_each_other() -> None:
    """With what they differ in; that the same ranks wait in them is not said again."""
    calls = {
        "0": "all_reduce #6 of float32 [8] at train.py:41",
        "1": "broadcast #6 root 0 of float32 [8] at train.py:4",
    }
    evidence = {"calls": calls, "waiting": calls, "where": {"0": "in a collective"}, "difference": "operation"}
    text = told(replace(HANG, code="HANG502", ranks=(0, 1), evidence={**evidence, "hang": "0:2"}))
    assert (
        "  calls     they differ in the operation\n"
        "            rank 0: all_reduce #6 of float32 [8]       at train.py:41\n"
        "            rank 1: broadcast #6 root 0 of float32 [8] at train.py:4\n"
        "  perhaps"
    ) in text


@pytest.mark.parametrize("evidence", [{"missing": 7, "waiting": [1], "stacks": {"0": None}}, {"stacks": {"x": 3}}, {}])
def test_a_damaged_hang_is_told_as_far_as_it_can_be(evidence: dict[str, object]) -> None:
    """The report reads files; nothing in them may keep the others from being told."""
    assert "HANG501" in told(replace(HANG, evidence={**evidence, "hang": "0:1"}))


def test_the_end_of_a_hang_is_one_line() -> None:
    """And only once, whatever else becomes known."""
    over = replace(HANG, evidence={**HANG.evidence, "ended_after_seconds": 21.4})
    text = told(HANG, over, replace(over, evidence={**over.evidence, "more": 1}))
    assert text.endswith("explain HANG501\nddpdebug: the hang at step 5 is over after 21 s: rank 1 went on\n")


def test_who_speaks_for_rank_0_says_the_end_as_well() -> None:
    """Rank 0 says in a line what was told in its place, and leaves the rest to who has told it."""
    silent = replace(HANG, ranks=(0,), evidence={**HANG.evidence, "hang": "1:1"})
    over = replace(silent, evidence={**silent.evidence, "ended_after_seconds": 20.6})
    assert told(silent, over, speaks=1).endswith("ddpdebug: the hang at step 5 is over after 21 s: rank 0 went on\n")
    assert told(silent, over) == (
        "ddpdebug: reported by rank 1, because rank 0 could not: HANG501, a rank stopped advancing while others wait"
        " (step 5 · rank 0 · data · /home/me/train.py:33)\n"
    )


def test_a_rank_at_work_is_one_line_and_no_trouble() -> None:
    """The state of the waiting is told again and again; a line comes with one of the records only."""
    stream = Recording()
    terminal = Terminal(0, stream)
    waiting = Waiting(state=WaitState.AT_WORK, ranks=(1,), seconds={0: 11.0})
    for record in (waiting, replace(waiting, line="others wait: rank 1 is at work"), waiting, Waiting()):
        terminal.write(record)
    assert stream.getvalue() == "ddpdebug: others wait: rank 1 is at work\n"
