"""A verdict as JSON and as JUnit XML. Torch-free; builds text, writes nothing.

JUnit is what the strictest of the schemas in use allows: properties belong to the suite, a case has one failure, and
every suite says when and how long it ran.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from ddpdebug.ci.verdict import Verdict, Word
from ddpdebug.detectors.catalog import FAMILIES
from ddpdebug.detectors.nature import restart
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.step import FLAT
from ddpdebug.sinks.text import parts
from ddpdebug.sinks.words import clean, ranks_text

#: The time of a document that nobody dated.
EPOCH = "1970-01-01T00:00:00"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_json(verdict: Verdict, run: str | None) -> str:
    """Return the verdict as one JSON object; `run` is the run directory."""
    record: dict[str, Any] = {
        "verdict": verdict.word.value,
        "exit_code": verdict.exit_code,
        "findings": [
            {**json.loads(finding.to_json()), "restart": restart(finding)}
            for finding in (*verdict.failing, *verdict.others)
        ],
        "ranks": {str(rank): _rank(verdict, rank) for rank in verdict.ranks},
        "blamed": list(verdict.blamed),
        "hang": None if verdict.hang is None else {"code": verdict.hang.code, "story": list(verdict.story)},
        "notes": list(verdict.notes),
        "ignored": dict(verdict.ignored),
        "not_checked": list(verdict.unchecked),
        "coverage": None if verdict.coverage is None else verdict.coverage.to_json(),
        "run": run,
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def to_junit(verdict: Verdict, run: str | None, *, time: str = EPOCH) -> str:
    """Return the verdict as JUnit XML: a suite with one test case for each family of findings, and one for the script.

    Args:
        time: when the check ended, ISO 8601 without a zone.
    """
    root = ET.Element("testsuites")
    # a case for each family, whether or not it has findings: a CI history then shows the same cases in every run
    for name in ("script", *FAMILIES):
        case = new_case(name)
        properties, output = ET.Element("properties"), ""
        if name == "script":
            _script_case(case, properties, verdict, run)
        else:
            output = _family_case(case, properties, verdict, name)
        add_suite(root, name, time, properties, [case], output)
    case, properties = new_case("coverage"), ET.Element("properties")
    _coverage_case(case, verdict)
    add_suite(root, "coverage", time, properties, [case], "")
    return document(root)


def _coverage_case(case: ET.Element, verdict: Verdict) -> None:
    """Fill in the case of what was looked at: skipped where something was not, failed where that was required."""
    if not verdict.unchecked:
        if verdict.coverage is None:
            ET.SubElement(case, "skipped", message="no rank recorded what it checked")
        return
    message = xml_text(clean("; ".join(verdict.unchecked)))
    if verdict.fails_unchecked:
        failure = ET.SubElement(case, "failure", type="not checked", message=message)
        failure.text = xml_text("\n".join(map(clean, verdict.unchecked)))
    else:
        ET.SubElement(case, "skipped", message=message)


def _family_case(case: ET.Element, properties: ET.Element, verdict: Verdict, name: str) -> str:
    """Fill in the case of a family: the first finding is the gravest, the earliest cause; return the findings below."""
    failing = [finding for finding in verdict.failing if family(finding) == name]
    others = [finding for finding in verdict.others if family(finding) == name]
    if failing:
        first = failing[0]
        add_property(properties, "step", "" if first.step is None else str(first.step))
        add_property(properties, "rank", _ranks(first.ranks))
        add_property(properties, "parameter", ",".join(first.subject))
        message = xml_text(f"{first.code} {clean(first.title)}")
        failure = ET.SubElement(case, "failure", type=xml_text(first.code), message=message)
        failure.text = xml_text("\n\n".join(map(describe, failing)))
    return "\n\n".join(map(describe, others))


def describe(finding: Finding) -> str:
    """Return a finding as plain lines: title, place, evidence, causes, remedy."""
    lines = [f"{finding.code} {finding.severity.label}: {clean(finding.title)}"]
    for label, words in parts(finding):
        lines += [f"{label}: {line}" for line in words]
    return "\n".join(lines)


def _rank(verdict: Verdict, rank: int) -> dict[str, Any]:
    outcome = verdict.outcomes.get(rank)
    return {
        "reason": verdict.ranks[rank],
        "exit_code": None if outcome is None else outcome.exit_code,
        "steps": None if outcome is None else dict(outcome.steps),
    }


def _script_case(case: ET.Element, properties: ET.Element, verdict: Verdict, run: str | None) -> None:
    if run is not None:
        add_property(properties, "run", run)
    if verdict.word in {Word.FAILED, Word.HANG, Word.LOST}:
        who = _ranks(verdict.blamed)
        add_property(properties, "rank", who)
        who = who.replace(",", ", ")
        message = f"{verdict.word.value}: ranks {who}" + (f": {'; '.join(verdict.story)}" if verdict.story else "")
        error = ET.SubElement(case, "error", type=verdict.word.value, message=xml_text(message))
        ends = verdict.ends(verdict.ranks).items()
        error.text = xml_text("\n".join(f"{who}: {clean(words)}" for who, words in ends))


def _ranks(ranks: Collection[int]) -> str:
    """Return ranks one by one, very many as people read them."""
    return ",".join(map(str, ranks)) if len(ranks) <= FLAT else ranks_text(ranks).partition(" ")[2]


def family(finding: Finding) -> str:
    """Return the family of a finding: the letters of its code."""
    return finding.code.rstrip("0123456789")


# --- the pieces of a JUnit document, for the preflight's too ----------------------------------------------------------


def xml_text(text: str) -> str:
    """Return a text with `?` in place of characters that XML does not allow."""
    return _NOT_XML.sub("?", text)


def new_case(name: str) -> ET.Element:
    """Return a test case of JUnit that passed."""
    return ET.Element("testcase", classname="ddpdebug", name=xml_text(name), time="0")


def add_property(element: ET.Element, name: str, value: str) -> None:
    """Add a property to a suite's properties."""
    ET.SubElement(element, "property", name=name, value=xml_text(value))


def add_suite(
    root: ET.Element, name: str, time: str, properties: ET.Element, cases: Sequence[ET.Element], output: str
) -> None:
    """Add a test suite with its cases; its counts are computed from them."""
    suite = ET.SubElement(root, "testsuite", id=str(len(root)), name=xml_text(name), package="ddpdebug")
    suite.attrib.update(hostname="localhost", timestamp=time, time="0", tests=str(len(cases)))
    for count, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(kind) is not None for case in cases)))
    suite.extend((properties, *cases))
    ET.SubElement(suite, "system-out").text = xml_text(output)
    ET.SubElement(suite, "system-err")


def document(root: ET.Element) -> str:
    """Return the text of the XML file."""
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
