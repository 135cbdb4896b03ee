"""What the preflight writes: lines, JSON, JUnit, the page, the plots."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import xmlschema

from ddpdebug.preflight.output.axes import Axis
from ddpdebug.preflight.output.files import to_json, to_junit, write
from ddpdebug.preflight.output.page import page
from ddpdebug.preflight.output.results import Check, Plot, Series, Status, Table
from ddpdebug.preflight.output.svg import svg
from ddpdebug.preflight.output.terminal_plot import draw
from ddpdebug.preflight.output.text import render, styled

EVIL = "\x1b[31m</script><img src=http://198.51.100.1/x onerror=alert(1)>\n$x^"
SWEEP = Plot(
    title="loss against learning rate",
    x_label="learning rate",
    y_label="loss",
    series=(
        Series(name="smoothed", x=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1), y=(2.3, 2.2, 1.4, 0.8, 9.0)),
        Series(name="measured", x=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1), y=(2.4, math.nan, 1.3, 0.9, math.inf)),
    ),
    log_x=True,
    marks=((1e-3, "steepest descent"),),
)
FLAT = Plot(title="flat", x_label="step", y_label="loss", series=(Series(name="loss", x=(0, 1, 2), y=(1.0, 1.0, 1.0)),))
VOID = Plot(title="void", x_label="step", y_label="", series=(Series(name="loss", x=(0, 1), y=(math.nan, math.inf)),))
CHECKS = [
    Check(group="data", name="shapes", status=Status.PASS, summary="8 batches of float32 [32, 3]"),
    Check(
        group="data",
        name="inputs",
        status=Status.INFO,
        summary="two tensors",
    ),
    Check(
        group="initial loss",
        name="expected",
        status=Status.FAIL,
        summary="the loss is 9.2 and not 2.3",
        code="RCP801",
        evidence={"loss": 9.2, "worst": math.inf},
        hypotheses=("the last layer is too wide", "labels are shifted"),
        actions=("look at the logits",),
        tables=(Table(head=("layer", "std"), rows=tuple((f"layers.{i}", 0.5 * i) for i in range(300))),),
    ),
    Check(group="learning rate", name="sweep", status=Status.WARN, summary="too high", plots=(SWEEP, FLAT, VOID)),
    Check(group="determinism", name="times", status=Status.SKIPPED, summary="no loader"),
]
HOSTILE = [
    Check(
        group=EVIL,
        name=EVIL,
        status=Status.FAIL,
        summary=EVIL,
        code=EVIL,
        evidence={EVIL: EVIL},
        hypotheses=(EVIL, EVIL),
        actions=(EVIL,),
        plots=(Plot(title=EVIL, x_label=EVIL, y_label=EVIL, series=SWEEP.series, marks=((0.01, EVIL),)),),
        tables=(Table(head=(EVIL,), rows=((EVIL,),)),),
    )
]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_shows_all_and_keeps_its_width(width: int) -> None:
    """Every check has its line; what is wrong is followed by numbers, causes, what to do, its table and its picture."""
    text = render(CHECKS, width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for words in ("1 failed", "1 to look at", "worst: inf", "1. the last layer", "2. labels are shifted"):
        assert words in flat
    assert "look at the logits" in flat
    assert "ddpdebug explain RCP801" in flat
    assert "and 292 more rows" in flat
    assert "steepest descent" in flat
    assert flat.index("no loader") < flat.index("1. the last layer") < flat.index("warn learning rate: sweep")


def test_colours_change_nothing_but_colour() -> None:
    """Without its escape codes the styled form has the plain form's overview and texts."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", styled(CHECKS, 80)).splitlines()
    assert "\x1b[" in styled(CHECKS, 80)
    assert [line.rstrip() for line in lines][:25] == render(CHECKS, 80).splitlines()[:25]


def test_hostile_names_are_shown_as_they_are_spelt() -> None:
    """Escape codes of the job reach no terminal, its tags no page; all formats still parse."""
    for text in (render(HOSTILE), re.sub(r"\x1b\[[0-9;]*m", "", styled(HOSTILE))):
        assert "\x1b" not in text
        assert "\\x1b[31m</script>" in text
    html = page(HOSTILE, EVIL)
    assert "<script" not in html
    assert "<img src=http" not in html
    assert json.loads(to_json(HOSTILE, EVIL))["checks"][0]["name"] == EVIL
    assert ET.fromstring(to_junit(HOSTILE)).find(".//failure") is not None


class _Balance(HTMLParser):
    """Collects the tags that were opened and never closed, and what the page would load."""

    VOID = frozenset({"meta", "link", "img", "br", "line", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    """Every tag is closed, every address is a place in the page or data, and all that was found stands in it."""
    parser = _Balance()
    parser.feed(page(CHECKS, "preflight of train.py"))
    assert parser.open == []
    assert all(address.startswith(("#", "data:")) for address in parser.loaded)
    assert parser.loaded[1:10] == [*(f"#check-{i}" for i in range(5)), "#check-2", "#check-2", "#check-3", "#check-3"]
    text = " ".join(parser.texts)
    for words in (
        "8 batches",
        "worst: inf",
        "labels are shifted",
        "and 100 more",
        "steepest descent (0.001)",
        "no loader",
    ):
        assert words in text
    assert "nothing that can be drawn" in text


def test_json_is_strict() -> None:
    """What is not finite is a text."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads(to_json(CHECKS, "t"), parse_constant=refuse)
    assert record["counts"] == {"pass": 1, "warn": 1, "fail": 1, "info": 1, "skipped": 1}
    assert record["checks"][2]["evidence"] == {"loss": 9.2, "worst": "inf"}
    assert record["checks"][3]["plots"][0]["series"][1]["y"] == [2.4, "nan", 1.3, 0.9, "inf"]


def test_junit_fails_where_a_check_failed() -> None:
    """A suite for each group; a warning is told and fails nothing; the schema of the strictest consumer holds."""
    text = to_junit(CHECKS)
    for schema in sorted((Path(__file__).parent.parent / "support" / "schemas").glob("*.xsd")):
        xmlschema.XMLSchema(schema).validate(text)
    root = ET.fromstring(text)
    suites = {suite.get("name"): suite for suite in root}
    counts = {name: (s.get("tests"), s.get("failures"), s.get("skipped")) for name, s in suites.items()}
    assert counts["data"] == ("2", "0", "0")
    assert counts["initial loss"] == ("1", "1", "0")
    assert counts["determinism"] == ("1", "0", "1")
    assert "labels are shifted" in (suites["initial loss"].findtext(".//failure") or "")
    assert "too high" in (suites["learning rate"].findtext("system-out") or "")


def test_an_axis_has_numbers_that_people_count_in() -> None:
    """Decades where they fit, round numbers elsewhere, and no place for what cannot be drawn."""
    assert [text for _, text in Axis([1e-7, 10], log=True).ticks(9)] == [
        f"1e-{power}" if power > 4 else f"{10.0**-power:g}" for power in range(7, -2, -1)
    ]
    assert [text for _, text in Axis([0, 10], log=False).ticks(6)] == ["0", "2", "4", "6", "8", "10"]
    assert [text for _, text in Axis([1000.1, 1000.4], log=False).ticks(4)] == ["1000.1", "1000.2", "1000.3", "1000.4"]
    assert math.isnan(Axis([1, 10], log=True).place(0))
    assert math.isnan(Axis([1, 10], log=False).place(math.inf))
    for values in ([5.0], [0.0], [-1e308, 1e308], [1e-320, 1e-300], [7e-308], [3e307, 1.7e308]):
        axis = Axis(values, log=False)
        assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in values)
        assert axis.ticks(5)


@pytest.mark.parametrize("color", [True, False])
def test_a_line_goes_where_its_values_are(color: bool) -> None:
    """The lowest value is drawn at the bottom, the highest at the top, a mark below its place."""
    plot = Plot(title="t", x_label="x", y_label="", series=SWEEP.series[:1], log_x=True, marks=SWEEP.marks)
    lines = ["".join(text for text, _ in line) for line in draw(plot, 60, height=8, color=color)]
    body = [line.partition("│")[2] or line.partition("┤")[2] for line in lines[1:9]]
    last = [row for row, line in enumerate(body) if line[-1:].strip()]
    assert last[0] == 0
    arrow = next(line for line in lines if "└" in line).index("▲")
    assert 30 <= arrow <= 34
    assert "▲ 0.001: steepest descent" in lines[-1]


def test_a_gap_stays_a_gap() -> None:
    """A value that is not finite breaks the line and is drawn nowhere."""
    drawn = re.findall(r'<path d="(M[^"]+)" fill', svg(SWEEP))
    assert [path.count("M") for path in drawn] == [2, 1]
    assert [path.count("L") for path in drawn] == [1, 4]
    assert "nan" not in svg(SWEEP)
    assert "inf" not in svg(SWEEP)


def test_files_are_written(tmp_path: Path) -> None:
    """The directory is made."""
    files = write(CHECKS, tmp_path / "a" / "b", "preflight")
    assert [file.name for file in files] == ["preflight.json", "junit.xml", "preflight.html"]
    assert all(file.stat().st_size > 500 for file in files)


@pytest.mark.slow
def test_a_real_browser_shows_the_page_and_asks_for_nothing(tmp_path: Path, need: Callable[[str], str]) -> None:
    """Hostile names stay text, no error on the console, no request to anywhere."""
    browser, log = need("chromium"), tmp_path / "net.json"
    file = write([*CHECKS, *HOSTILE], tmp_path, "preflight of train.py")[2]
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-sync"]
    words += ["--enable-logging=stderr", f"--log-net-log={log}", f"--screenshot={tmp_path / 'page.png'}", "--dump-dom"]
    done = subprocess.run([*words, file.as_uri()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<title>preflight of train.py</title>" in done.stdout
    assert "RCP801" in done.stdout
    assert "CONSOLE" not in done.stderr
    assert "198.51.100.1" not in log.read_text(errors="replace").replace("%22", '"')
    assert (tmp_path / "page.png").stat().st_size > 10_000
