"""The page about a run: complete, harmless, readable offline; looked at in a real browser where there is one."""

from __future__ import annotations

import html.parser
import json
import math
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ddpdebug.commands import main
from ddpdebug.disk import Disk
from ddpdebug.progress.black_box import BlackBox
from ddpdebug.reports.html import duration, heat_map, lines, parting, round_step, timeline
from ddpdebug.reports.pace import ROWS, SPANS, PaceHistory
from ddpdebug.reports.page import checked, finding_article, report, worst_first
from ddpdebug.reports.reading import POINTS, Thinned, read_history
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.coverage import Coverage, RankCoverage, Tally
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.progress import RankProgress
from ddpdebug.schema.row import Digest, Flag, Row
from ddpdebug.schema.step import Step
from ddpdebug.schema.wire import to_json
from ddpdebug.sinks import Covered, FindingRaised, RunEnded, RunStarted, StepJudged

EVIL = '"><script>document.title="taken"</script><img src="http://198.51.100.1/x.png" onerror="alert(1)">\n\x1b[2J'
WORLD = 3


def write_run(directory: Path, *, steps: int = 40, ended: bool = True, evil: str = "layers.0.weight") -> None:
    """Write the directory of a run whose rank 2 is ill from step 20 on."""
    sink = RunDirectory(directory, 0)
    sink.write(RunStarted(run_id="r1", rank=0, world=WORLD, directory=directory, config={}, versions={evil: evil},
                          command=("train.py", evil), time="2026-11-21T08:00:00Z", node=evil))  # fmt: skip
    for step in range(steps):
        rows = {}
        for rank in range(WORLD):
            sick = rank == 2 and step >= 20
            rows[rank] = Row(
                rank=rank, step=step, flags=int(Flag.LOSS_NONFINITE) if sick and step == 30 else 0,
                loss=math.nan if step == 30 else 2.0 / (step + 1), grad_norm=1.0 if step % 4 == 0 else math.nan,
                step_seconds=0.2, data_seconds=0.01, forward_seconds=0.05, backward_seconds=0.1,
                optimizer_seconds=0.01, host_bytes=1 << 30, params_after_digest=Digest(5 + sick),
            )  # fmt: skip
        sink.write(StepJudged(step=Step(step=step, optimizer=0, world=WORLD, rows=rows)))
    sink.write(FindingRaised(finding=Finding(
        code="RANK101", severity=Severity.CRITICAL, title=f"parameters differ {evil}", step=20, last_step=39, count=20,
        ranks=(2,), subject=(evil, "b"), phase=evil, location=evil, evidence={evil: {"0": evil, "2": 1.5}},
        causes=[evil, "a cause"], actions=["do this"], id="RANK101-1",
    )))  # fmt: skip
    if ended:
        sink.write(RunEnded(reason=evil if "<" in evil else "finished", exit_code=0, steps={0: steps}))
    sink.close()


def test_a_run_that_hung_shows_what_each_rank_did_last(tmp_path: Path) -> None:
    """By its black box, with the stacks of the hang; all of it is escaped."""
    write_run(tmp_path, ended=False)
    hang = Finding(code="HANG501", severity=Severity.CRITICAL, title="t", evidence={"stacks": {EVIL: [EVIL] * 99}})
    with (tmp_path / "findings.jsonl").open("a", encoding="utf-8") as file:
        file.write(hang.to_json() + "\n")
    look = RankProgress(rank=1, step=39, phase="data", place=EVIL, kind="queue", does=EVIL, function=EVIL)
    (tmp_path / "ranks" / "1").mkdir(parents=True)
    box = BlackBox(tmp_path / "ranks" / "1" / "black_box", Disk())
    box.note(f"all_reduce #118 {EVIL}")
    box.beat({**to_json(look), "ended": EVIL})
    box.close()
    page = report(tmp_path)
    assert "What the ranks did last" in page
    assert "all_reduce #118" in page
    assert "where the ranks were" in page
    assert "<script" not in page
    assert "\x1b" not in page
    write_run(tmp_path / "well")
    assert "What the ranks did last" not in report(tmp_path / "well")


class Elements(html.parser.HTMLParser):
    """Collects the elements of a page, and everything that might load or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.loaded += [value or "" for name, value in attrs if name in {"src", "href", "action", "data", "srcset"}]
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_verdicts_findings_and_charts(tmp_path: Path) -> None:
    """What was found stands above what was measured."""
    write_run(tmp_path)
    text = report(tmp_path)
    for part in ("differ", "1 critical", "finished", "RANK101 · critical", "layers.0.weight", "a cause", "do this"):
        assert part in text
    assert text.count("<svg") == 7
    assert "<h2>What happened</h2>" in text
    assert "against rank 2" in text
    assert "differ from step 20" in text
    assert "Shape of the curve: <b>healthy</b>, steps 0 to 39." in text
    assert "<td>2</td><td>no outcome: killed, or still running</td><td>20 steps</td>" in text


def test_what_was_not_checked_is_on_the_page(tmp_path: Path) -> None:
    """A red tile with words and a row with the reason; nothing is said to be checked where nothing tells."""
    directory = tmp_path / "run"
    write_run(directory)
    assert "no rank recorded what it checked" in report(directory)
    sink = RunDirectory(tmp_path / "other", 0)
    sink.write(RunStarted(run_id="r", rank=0, world=2, directory=None, config={}, versions={}))
    account = {0: RankCoverage(steps=9)}
    sink.write(Covered(coverage=Tally(2).coverage(account, apart="rank 1 did not <b>come", ended=True)))
    text = report(tmp_path / "other")
    assert '<div class="tile bad">Checked<b>nothing compared</b></div>' in text
    assert "<td>nothing is compared between the ranks: rank 1 did not &lt;b&gt;come</td>" in text


def test_of_shards_the_page_says_what_was_compared() -> None:
    """Parameters without a replica were not: not everything was."""
    known: dict[str, Any] = {
        "world": 2,
        "compared": 2,
        "since": 0,
        "until": 8,
        "newest": 8,
        "last_checked": True,
        "ended": True,
    }
    for sharding, shown in (("", "everything"), ("sharded over dp: gathers are compared", "all but sharded parts")):
        ranks = (RankCoverage(steps=9, sharding=sharding), RankCoverage(rank=1, steps=9))
        words, colour = checked({"coverage": Coverage(**known, ranks=ranks).to_json()})
        assert words == shown
        assert (colour == "good") is (not sharding)


def test_a_validation_loss_is_drawn_and_judged(tmp_path: Path) -> None:
    """Where it was told, the curve's shape is that of both losses."""
    sink = RunDirectory(tmp_path, 0)
    sink.write(RunStarted(run_id="r1", rank=0, world=1, directory=tmp_path, config={}, versions={}, command=(),
                          time="2026-11-21T08:00:00Z", node="n"))  # fmt: skip
    for step in range(60):
        told = 1.0 + 0.02 * abs(step - 20) if step % 5 == 4 else math.nan
        rows = {0: Row(rank=0, step=step, loss=2.0 * 0.95**step, val_loss=told)}
        sink.write(StepJudged(step=Step(step=step, optimizer=0, world=1, rows=rows)))
    sink.close()
    text = report(tmp_path)
    assert "</i>validation</span>" in text
    assert "Shape of the curve: <b>overfitting</b>, steps 19 to 59." in text
    write_run(tmp_path / "without")
    assert "</i>validation</span>" not in report(tmp_path / "without")


def test_the_shape_is_that_of_one_kind_of_losses(tmp_path: Path) -> None:
    """A second loss that comes in turn, and stays, makes no oscillation of the first, which falls."""
    sink = RunDirectory(tmp_path, 0)
    sink.write(RunStarted(run_id="r1", rank=0, world=1, directory=tmp_path, config={}, versions={}, command=(),
                          time="2026-11-21T08:00:00Z", node="n"))  # fmt: skip
    for step in range(120):
        kind = 1 + (step % 3 == 2)
        rows = {0: Row(rank=0, step=step, loss=2.0 * 0.95**step if kind == 1 else 40.0, loss_kind=kind)}
        sink.write(StepJudged(step=Step(step=step, optimizer=0, world=1, rows=rows)))
    sink.close()
    assert "Shape of the curve: <b>healthy</b>, steps 0 to 118." in report(tmp_path)
    drawn = read_history(tmp_path).series["loss highest rank"]
    assert max(loss for _, loss in drawn) == 2.0


@pytest.mark.parametrize("beside", [False, True])
def test_an_optimizer_that_the_script_makes_later_is_drawn_where_the_first_one_ends(
    tmp_path: Path, beside: bool
) -> None:
    """As after a resume; of two that take turns the first is drawn."""
    sink = RunDirectory(tmp_path, 0)
    sink.write(RunStarted(run_id="r1", rank=0, world=1, directory=tmp_path, config={}, versions={}, command=(),
                          time="2026-11-21T08:00:00Z", node="n"))  # fmt: skip
    order = [(n % 2, n // 2) for n in range(80)] if beside else [(int(n >= 40), n) for n in range(80)]
    for optimizer, step in order:
        row = Row(rank=0, step=step, optimizer=optimizer, loss=1.0 + optimizer)
        sink.write(StepJudged(step=Step(step=step, optimizer=optimizer, world=1, rows={0: row})))
    sink.close()
    history = read_history(tmp_path)
    losses = {loss for _, loss in history.series["loss median rank"]}
    assert (history.last, losses) == ((39, {1.0}) if beside else (79, {1.0, 2.0}))


def test_hostile_names_stay_text_and_nothing_is_loaded(tmp_path: Path) -> None:
    """Every text from the job is escaped; the page has no element that could load or run anything."""
    write_run(tmp_path, evil=EVIL)
    text = report(tmp_path)
    found = Elements(text)
    assert found.open == []
    assert not found.tags & {"script", "img", "iframe", "object", "embed", "video", "audio", "base", "form", "a"}
    assert not {name for name in found.attributes if name.startswith("on")}
    assert found.loaded == ["data:,"]
    assert "http://198" in text  # as text
    assert "\x1b" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import", text)


_NAMES = ("0", "1", "shape", "value", "name", "dtype", "min", "zeros", "nan", "2-3")
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=4),
    max_leaves=8,
)
_KEYS = ("hang", "undecided_between", "missing", "waiting", "calls", "difference", "waited_seconds", "stacks", "error",
         "collectives_so_far", "ended_after_seconds", "bundle", "values", "x")  # fmt: skip


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=5), st.sampled_from(["HANG501", "RANK101"]))
def test_a_finding_with_any_evidence_is_shown(evidence: dict[str, object], code: str) -> None:
    """A run directory may be damaged, or come from anybody."""
    line = json.dumps({"code": code, "title": "t", "severity": "critical", "evidence": evidence})
    assert Elements(finding_article(Finding.from_json(line))).open == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_was_killed_has_a_page(tmp_path: Path, steps: int) -> None:
    """Even before its first step."""
    write_run(tmp_path, steps=steps, ended=False)
    text = report(tmp_path)
    assert "still running, or killed" in text
    assert Elements(text).open == []


def test_a_long_run_has_a_page_of_bounded_size() -> None:
    """Spikes survive the thinning."""
    thinned = Thinned("max")
    for step in range(100_000):
        thinned.add(step, 1000.0 if step == 77_777 else 1.0)
    points = thinned.finish()
    assert POINTS / 2 <= len(points) <= 2 * POINTS
    assert max(value for _, value in points) == 1000
    assert points[0][0] == 0
    assert points[-1][0] > 99_000


def test_what_was_not_computed_joins_and_what_was_not_finite_is_a_gap(tmp_path: Path) -> None:
    """A norm of every fourth step is a line; a NaN loss interrupts it."""
    write_run(tmp_path)
    history = read_history(tmp_path)
    assert [step for step, value in history.series["norm highest rank"] if not math.isnan(value)][:3] == [0, 4, 8]
    loss = dict(history.series["loss highest rank"])
    assert math.isnan(loss[30])
    path = lines({"highest rank": history.series["loss highest rank"]}, (0, 39), {})
    assert path.count("M") == 2


def test_a_timeline_shows_when_the_ranks_parted() -> None:
    """Green, red, green again; nothing where nothing was compared."""
    drawn = timeline({"x": [(0, 0.0), (5, 1.0), (8, 0.0)], "y": [(0, math.nan)]}, (0, 10), {})
    assert re.findall(r"<title>(\w+) from step (\d+)", drawn) == [("agree", "0"), ("differ", "5"), ("agree", "8")]


def test_the_command_writes_beside_the_run_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what is wrong with a directory that holds no run."""
    write_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").exists()
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path)]) == 2


@pytest.mark.smoke
def test_a_real_browser_shows_it_and_asks_for_nothing(tmp_path: Path, need: Callable[[str], str]) -> None:
    """Hostile names stay text, no error on the console, no request to anywhere."""
    browser = need("chromium")
    write_run(tmp_path / "run", evil=EVIL)
    assert main(["report", str(tmp_path / "run")]) == 0
    log = tmp_path / "net.json"
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-sync"]
    words += ["--enable-logging=stderr", f"--log-net-log={log}", f"--screenshot={tmp_path / 'page.png'}", "--dump-dom"]
    words.append((tmp_path / "run" / "report.html").as_uri())
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<title>ddpdebug: run r1</title>" in done.stdout
    assert "RANK101" in done.stdout
    assert "CONSOLE" not in done.stderr
    assert "198.51.100.1" not in log.read_text(errors="replace").replace("%22", '"')
    assert (tmp_path / "page.png").stat().st_size > 10_000


def paced(world: int, steps: int, slow: dict[int, float], phase: str = "forward", since: int = 0) -> PaceHistory:
    """Return the own times of ranks that all need 0.1 s for a step, and some of which need more since a step."""
    made = PaceHistory()
    for number in range(steps):
        more = {rank: slow.get(rank, 0.0) if number >= since else 0.0 for rank in range(world)}
        longest = 0.1 + max(more.values())
        rows = {}
        for rank, extra in more.items():
            parts = {"data": 0.01, "forward": 0.04, "backward_local": 0.05, phase: 0.04 + extra}
            own = {f"{name}_seconds": seconds for name, seconds in parts.items()}
            waits = longest - 0.1 - extra
            rows[rank] = Row(rank=rank, step=number, step_seconds=longest, backward_seconds=0.05 + waits,
                             sync_wait_seconds=waits, **own)  # type: ignore[arg-type]  # fmt: skip
        made.add(Step(step=number, optimizer=0, world=world, rows=rows))
    return made


def coloured(drawn: str) -> list[tuple[int, str, float, str]]:
    """Return row, colour, opacity and words of the cells that stand out."""
    found = re.findall(r'y="(\d+)"[^>]*fill="(#\w+)" opacity="([\d.]+)"><title>([^<]*)', drawn)
    return [(int(y), color, float(depth), words) for y, color, depth, words in found]


def test_the_map_shows_who_was_slow_when_and_in_which_phase() -> None:
    """The rest is even; two ranks can be told apart as well."""
    for world in (2, 4):
        found = paced(world, 100, {1: 0.03}, since=50)
        cells = coloured(heat_map(found, (0, 99), {}))
        assert {(color, depth) for _, color, depth, _ in cells} == {("#56B4E9", 0.75)}
        assert len({y for y, *_ in cells}) == 1
        assert len(cells) == 50
        assert (
            cells[0][3]
            == "rank 1, steps 50 to 50: 0.13 s a step, 23 % of it more than the median rank, mostly in forward"
        )
        first, *others = found.totals()
        assert (first.rank, first.last, first.phase) == (1, 0.5 if world == 4 else first.last, "forward")
        assert first.cost == pytest.approx(50 * 0.03)
        assert first.share == pytest.approx(50 * 0.03 / (50 * 0.1 + 50 * 0.13))
        assert [other.cost for other in others] == [0.0] * (world - 1)


def test_the_start_of_the_script_is_no_step() -> None:
    """Who imported longer is not slow."""
    found = paced(2, 5, {})
    rows = {rank: Row(rank=rank, step_seconds=9.0 + rank, flags=int(Flag.FIRST)) for rank in (0, 1)}
    found.add(Step(step=5, optimizer=0, world=2, rows=rows))
    assert (found.steps, [one.cost for one in found.totals()]) == (5, [0, 0])
    assert found.step_seconds == pytest.approx(0.1)


def test_two_ranks_that_are_equally_slow_cost_nothing_and_are_seen() -> None:
    """Repairing one of them would change nothing."""
    found = paced(4, 20, {1: 0.05, 3: 0.05})
    assert [one.cost for one in found.totals()] == [0.0] * 4
    assert {words.partition(",")[0] for *_, words in coloured(heat_map(found, (0, 19), {}))} == {"rank 1", "rank 3"}


@pytest.mark.slow
@pytest.mark.parametrize("world", [64, 65, 1024])
def test_the_map_of_a_large_long_run_is_bounded(world: int) -> None:
    """Neighbours share a row, in which the slowest is seen; spans of steps are joined."""
    found = paced(world, 200, {world - 1: 0.05})
    assert len(found.rows()) <= ROWS
    assert [rank for row in found.rows() for rank in row] == list(range(world))
    spans = list(found.spans())
    assert SPANS / 2 <= len(spans) <= SPANS
    assert [first for first, *_ in spans[1:]] == [last + 1 for _, last, _ in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (0, 199)
    drawn = heat_map(found, (0, 199), {})
    assert len(drawn) < 200 * ROWS * SPANS
    cells = coloured(drawn)
    assert len(cells) == len(spans)
    assert {words.partition(",")[0] for *_, words in cells} == {f"rank {world - 1}"}


def test_what_all_ranks_scatter_is_no_excess() -> None:
    """Among many somebody is far above the median in each span."""
    chance = random.Random(1)
    found = PaceHistory()
    for number in range(60):
        waits = [abs(chance.gauss(0.05, 0.01)) for _ in range(256)]
        rows = {rank: Row(rank=rank, step_seconds=0.2, sync_wait_seconds=wait) for rank, wait in enumerate(waits)}
        found.add(Step(step=number, optimizer=0, world=256, rows=rows))
    assert len(coloured(heat_map(found, (0, 59), {}))) <= 10  # of 3,840


def test_a_run_says_what_slow_ranks_cost_and_what_waits_for_data(tmp_path: Path) -> None:
    """In words beside the map, which is named for those who do not see it; one rank waits for nobody."""
    write_run(tmp_path / "run")
    text = report(tmp_path / "run")
    assert "Which rank is slow?" in text
    assert "A step took 0.2 s on average, of 40 steps that are kept; waiting for data was 5 % of it on the" in text
    assert "median rank, waiting for other ranks, with the reduction, was 50 % of it on average.</p>" in text
    assert 'aria-label="Own time of each rank' in text
    assert "<th>most of that in</th>" in text
    sink = RunDirectory(tmp_path / "alone", 0)
    sink.write(RunStarted(run_id="r", rank=0, world=1, directory=None, config={}, versions={}))
    sink.write(
        StepJudged(
            step=Step(
                step=0, optimizer=0, world=1, rows={0: Row(step_seconds=0.5, data_seconds=0.25, backward_seconds=0.0)}
            )
        )
    )
    sink.close()
    text = report(tmp_path / "alone")
    assert "; waiting for data was 50 % of it on the median rank.</p>" in text
    assert "Own time of each rank over" not in text


def test_the_start_of_the_script_does_not_flatten_the_times_of_the_steps(tmp_path: Path) -> None:
    """The chart begins with the second step."""
    sink = RunDirectory(tmp_path / "run", 0)
    sink.write(RunStarted(run_id="r", rank=0, world=1, directory=None, config={}, versions={}))
    for step, (seconds, flag) in enumerate([(60.0, int(Flag.FIRST)), (0.5, 0)]):
        rows = {0: Row(step=step, step_seconds=seconds, forward_seconds=seconds, backward_seconds=0.0, flags=flag)}
        sink.write(StepJudged(step=Step(step=step, optimizer=0, world=1, rows=rows)))
    sink.close()
    assert read_history(tmp_path / "run").series["forward"] == [(1, 0.5)]


@pytest.mark.parametrize(
    ("world", "words"), [(1, "."), (2, "; waiting for other ranks, with the reduction, was 20 % of it on average.")]
)
def test_a_run_whose_loader_was_not_seen_does_not_say_how_long_it_waited_for_data(
    world: int, words: str, tmp_path: Path
) -> None:
    """Nobody knows: that is not 0 %, and the sentence does without."""
    sink = RunDirectory(tmp_path / "run", 0)
    sink.write(RunStarted(run_id="r", rank=0, world=world, directory=None, config={}, versions={}))
    rows = {rank: Row(rank=rank, step_seconds=0.5, sync_wait_seconds=0.1) for rank in range(world)}
    sink.write(StepJudged(step=Step(step=0, optimizer=0, world=world, rows=rows)))
    sink.close()
    assert f"<p>A step took 0.5 s on average, of 1 step that are kept{words}</p>" in report(tmp_path / "run")


def test_durations_are_told_in_the_unit_that_fits() -> None:
    """To three digits; nothing where nobody knows."""
    found = [duration(seconds) for seconds in (0.0125, 3.14159, 89.0, 186.0, 9000.0, math.nan)]
    assert found == ["12.5 ms", "3.14 s", "89 s", "3.1 min", "2.5 h", ""]


def test_the_worst_finding_comes_first() -> None:
    """Then the earliest; the picture is of that one."""
    found = [
        Finding(code="A1", severity=Severity.WARNING, title="t", step=1),
        Finding(code="A2", severity=Severity.CRITICAL, title="t", step=9),
        Finding(code="A3", severity=Severity.CRITICAL, title="t", step=20),
    ]
    assert [finding.code for finding in worst_first(found)] == ["A2", "A3", "A1"]


def test_what_stands_in_backticks_is_code() -> None:
    """Names and calls in causes, escaped."""
    finding = Finding(code="A1", severity=Severity.ERROR, title="t", causes=["`set_epoch(<b>)` is missing"])
    assert "<code>set_epoch(&lt;b&gt;)</code> is missing" in finding_article(finding)


@pytest.mark.parametrize(
    ("least", "step"), [(0.3, 0.5), (1.0, 1.0), (1.2, 2.0), (17.0, 20.0), (60.0, 100.0), (0.0, 1.0), (1e301, 1e301)]
)
def test_axes_have_round_numbers(least: float, step: float) -> None:
    """One, two or five times a power of ten."""
    assert round_step(least) == pytest.approx(step)


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.37, 0.39), (1e-3, 1e5), (3.0, 3.0), (-1e308, 1e308), (-2.0, 7.0)])
def test_a_chart_is_drawn_of_any_values(values: tuple[float, float]) -> None:
    """Also of very large, equal and negative ones."""
    text = lines({"data": list(enumerate(values))}, (0, 1), {}, "")
    assert 2 <= text.count('class="grid"') <= 13


def test_the_picture_shows_who_parted_from_whom() -> None:
    """A line for each rank; the one that parted is dashed from the step on."""
    text = parting(3, [[0, 2], [1]], (0, 40), 20, "RANK101", undecided=False)
    assert text.count("stroke-dasharray") == 1
    assert "rank 1: parted" in text
    alike = parting(2, [[0, 1]], (0, 40), 20, "RCP801", undecided=False)
    assert "on all ranks alike" in alike
    assert "parted" not in alike
    tie = parting(2, [[0], [1]], (0, 40), 20, "RANK101", undecided=True)
    assert tie.count("stroke-dasharray") == 2
