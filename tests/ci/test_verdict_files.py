"""A verdict in the formats of CI services: valid, complete, and with nothing of the job's unescaped."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import junitparser
import pytest
import xmlschema
from markdown_it import MarkdownIt

from ddpdebug.ci.github_gitlab import MAX_ANNOTATIONS, to_codequality, to_github, to_markdown
from ddpdebug.ci.json_junit import to_json, to_junit
from ddpdebug.ci.verdict import Outcome, Verdict, judge, with_coverage
from ddpdebug.detectors.catalog import FAMILIES, catalog
from ddpdebug.schema.coverage import RankCoverage, Tally
from ddpdebug.schema.finding import Finding, Severity

_SCHEMA = xmlschema.XMLSchema(Path(__file__).parent.parent / "support" / "schemas" / "junit_strict.xsd")
_EVIL = "w\x00]]>\x1b[31m\ud800 <script>&\u2028\n::error::x | `*_[a](b)"


def _finding(code: str = "RANK101", severity: Severity = Severity.CRITICAL, **more: object) -> Finding:
    values = {"title": "parameters differ", "step": 3, "ranks": (1,), "subject": ("w",), **more}
    return Finding(code=code, severity=severity, **values)


def _hang() -> Finding:
    evidence = {"waiting": {"0": _EVIL}, "missing": {"1": _EVIL}, "difference": _EVIL}
    return _finding("HANG501", evidence=evidence)


def _outcomes(world: int = 2) -> dict[int, Outcome]:
    return {rank: Outcome(rank=rank, reason="finished", exit_code=0, steps={"0": 5}) for rank in range(world)}


VERDICTS: dict[str, Verdict] = {
    "clean": judge([], _outcomes(), world=2),
    "findings": judge([_finding(), _finding("SYNC203"), _finding("RANK104")], _outcomes(), world=2),
    "below": judge([_finding("DATA902", Severity.WARNING)], _outcomes(), world=2),
    "hang": judge([_finding()], {}, world=2, timed_out=True, places={1: _EVIL}),
    "hang found": judge([_hang()], {}, world=2, hung=True),
    "failed": judge([], {1: Outcome(rank=1, reason=f"exception: {_EVIL}", exit_code=1)}, world=2, statuses={1: 1}),
    "evil": judge(
        [_finding(title=_EVIL, subject=(_EVIL, _EVIL), location=f"{_EVIL}:7", evidence={_EVIL: _EVIL})],
        _outcomes(),
        world=2,
    ),
    "many": judge([_finding(subject=(f"w{n}",)) for n in range(40)], _outcomes(), world=2),
}
each = pytest.mark.parametrize("name", VERDICTS)


def _suites(verdict: Verdict) -> dict[str, ET.Element]:
    root = ET.fromstring(to_junit(verdict, "runs/x").split("\n", 1)[1])
    return {str(suite.get("name")): suite for suite in root}


@each
def test_junit_is_valid(name: str) -> None:
    """Every verdict satisfies the strictest schema, with one case for each family, and one for what was not checked."""
    text = to_junit(VERDICTS[name], "runs/x", time="2026-01-02T03:04:05")
    _SCHEMA.validate(text.split("\n", 1)[1])
    assert list(_suites(VERDICTS[name])) == ["script", *FAMILIES, "coverage"]


def test_schema_is_strict() -> None:
    """The schema refuses what some consumers do."""
    text = to_junit(VERDICTS["findings"], None).split("\n", 1)[1]
    for wrong in (text.replace(' time="0"', "", 1), text.replace("</failure>", "</failure><failure type='x'/>", 1)):
        assert wrong != text
        assert not _SCHEMA.is_valid(wrong)


@each
def test_junit_is_read_by_a_consumer(name: str) -> None:
    """What another parser counts is what the verdict says."""
    verdict = VERDICTS[name]
    suites = list(junitparser.JUnitXml.fromstring(to_junit(verdict, None).encode()))
    assert sum(suite.tests for suite in suites) == 2 + len(FAMILIES)
    failing = {finding.code.rstrip("0123456789") for finding in verdict.failing}
    failed = {
        case.name for suite in suites for case in suite for r in case.result if isinstance(r, junitparser.Failure)
    }
    assert failed == failing
    assert sum(suite.failures for suite in suites) == len(failing)
    assert sum(suite.errors for suite in suites) == (verdict.exit_code > 1)


def test_junit_tells_the_first_cause() -> None:
    """The failure of a family is its gravest finding, its place the properties; the others follow in the text."""
    suite = _suites(VERDICTS["findings"])["RANK"]
    properties = {p.get("name"): p.get("value") for p in suite.iterfind("properties/property")}
    assert properties == {"step": "3", "rank": "1", "parameter": "w"}
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert (failure.get("type"), failure.get("message")) == ("RANK101", "RANK101 parameters differ")
    assert re.search(r"RANK101.*step 3.*RANK104", failure.text or "", re.DOTALL)


def test_junit_names_the_host_where_there_are_several() -> None:
    """The property stays a list of ranks."""
    suite = _suites(judge([_finding(places={"1": "node-b, cuda:1"})], _outcomes(), world=2))["RANK"]
    assert {p.get("value") for p in suite.iterfind("properties/property")} == {"3", "1", "w"}
    assert "rank 1 (node-b, cuda:1)" in (suite.findtext("testcase/failure") or "")


def test_junit_shows_what_does_not_count() -> None:
    """A green case means that something was looked at: no family of findings is without rules."""
    suites = _suites(VERDICTS["below"])
    assert {rule.code.rstrip("0123456789") for rule in catalog()} == set(FAMILIES)
    assert not any(suites[name].find("testcase/skipped") is not None for name in FAMILIES)
    assert suites["DATA"].find("testcase/failure") is None
    assert "DATA902" in (suites["DATA"].findtext("system-out") or "")


@pytest.mark.parametrize("required, kind", [(False, "skipped"), (True, "failure")])
def test_what_was_not_checked(required: bool, kind: str) -> None:
    """It is a case of its own: skipped, or failed where checks are required; JSON, Markdown and GitHub have it too."""
    missed = Tally(1).coverage({0: RankCoverage(steps=3, unwatched={"of the type Odd": 2})}, certain=True, ended=True)
    verdict = with_coverage(VERDICTS["clean"], missed, required=required, ranks=1)
    words = "2 parameters not compared: of the type Odd"
    text = to_junit(verdict, "runs/x", time="2026-01-02T03:04:05")
    _SCHEMA.validate(text.split("\n", 1)[1])
    case = _suites(verdict)["coverage"].find(f"testcase/{kind}")
    assert case is not None
    assert (case.get("message") or "").startswith(words)
    record = json.loads(to_json(verdict, None))
    assert (record["verdict"], record["exit_code"], record["coverage"]["complete"]) == ("not checked", required, False)
    assert record["not_checked"][0].startswith(words)
    assert words in to_markdown(verdict, None)
    assert to_github(verdict)[0].startswith(f"::{'error' if required else 'warning'} title=ddpdebug%3A not checked::")
    complete = with_coverage(VERDICTS["clean"], Tally(1).coverage({0: RankCoverage(steps=3)}, ended=True), ranks=1)
    assert not list(_suites(complete)["coverage"].iterfind("testcase/*"))


def test_junit_of_a_hang_names_the_ranks() -> None:
    """A script that did not run to its end is an error of the case `script`."""
    suite = _suites(VERDICTS["hang"])["script"]
    error = suite.find("testcase/error")
    assert error is not None
    assert error.get("type") == "hang"
    assert "rank 1: did not end in time" in (error.text or "")


def test_github_annotations() -> None:
    """Each cause is one line that names file and line from the checkout's root; at most ten."""
    verdict = judge([_finding(location="/repo/src/a, b.py:12")], _outcomes(), world=2)
    (line,) = to_github(verdict, "/repo")
    assert line.startswith("::error file=src/a%2C b.py,line=12,title=RANK101 parameters differ::")
    assert "%0Awhere: step 3" in line
    assert len(to_github(VERDICTS["many"])) == MAX_ANNOTATIONS
    (hang, finding) = to_github(VERDICTS["hang"])
    assert hang.startswith("::error title=ddpdebug%3A hang::rank 0: did not end")
    assert finding.startswith("::error title=RANK101")
    assert to_github(VERDICTS["clean"]) == []


@each
def test_github_annotations_are_single_lines(name: str) -> None:
    """Nothing from the job starts a line of its own or a second command."""
    for line in to_github(VERDICTS[name], "/repo"):
        assert line.isprintable()
        properties = line.removeprefix("::error ").partition("::")[0]
        assert re.fullmatch(r"(file=[^,:]*,line=\d+,)?title=[^,:]*", properties)


@each
def test_codequality(name: str) -> None:
    """Every finding is an entry with what GitLab requires; fingerprints do not depend on the step."""
    verdict = VERDICTS[name]
    entries = json.loads(to_codequality(verdict, "train.py"))
    assert len(entries) == len(verdict.failing) + len(verdict.others) + (verdict.exit_code > 1)
    for entry in entries:
        assert entry.keys() == {"description", "check_name", "fingerprint", "severity", "location"}
        assert entry["severity"] in {"info", "minor", "major", "critical", "blocker"}
        assert entry["location"]["path"]
        assert entry["location"]["lines"]["begin"] >= 1
        assert entry["description"].isprintable()
    later = judge([_finding(step=9)], _outcomes(), world=2)
    first = judge([_finding(step=3)], _outcomes(), world=2)
    prints = [json.loads(to_codequality(v, "train.py"))[0]["fingerprint"] for v in (first, later)]
    assert prints[0] == prints[1]


@each
def test_markdown_shows_text_as_text(name: str) -> None:
    """A renderer makes no elements of what came from the job."""
    verdict = VERDICTS[name]
    text = to_markdown(verdict, "runs/x").encode("utf-8", "backslashreplace").decode()
    shown = MarkdownIt().enable("table").render(text)
    assert f"ddpdebug: {verdict.word.value}" in shown
    assert "<script" not in shown
    assert "<a " not in shown
    assert "<em>" not in shown
    rows = re.findall(r"<tr>(.*?)</tr>", shown, re.DOTALL)
    assert {row.count("<td>") for row in rows[1:]} <= {6}
    assert len(rows[1:]) == min(20, len(verdict.failing) + len(verdict.others))
    if verdict.failing and name != "evil":
        assert html.escape(verdict.failing[0].title) in shown


def test_ranks_that_ended_alike_are_told_of_together() -> None:
    """Of a thousand ranks nobody reads as many lines; who they are, and how many, is right."""
    ends = {rank: Outcome(rank=rank, reason="exception: RuntimeError: no", exit_code=1) for rank in range(0, 1024, 2)}
    finding = _finding(ranks=tuple(range(0, 1024, 2)))
    verdict = judge([finding], ends, world=1024, statuses=dict.fromkeys(ends, 1))
    assert len(verdict.blamed) == 512
    for text in (to_junit(verdict, None), to_markdown(verdict, None), "\n".join(to_github(verdict))):
        assert "26,28,30 and 496 more" in text
        assert len(text) < 12_000
