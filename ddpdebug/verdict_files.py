"""A verdict as JSON and as JUnit XML. Torch-free; builds text, writes nothing."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree as ET

from ddpdebug.detectors.catalog import catalog
from ddpdebug.findings import Finding
from ddpdebug.sinks.text import clean, parts
from ddpdebug.verdict import Verdict, Word

#: One test case each, whether or not the family has findings: a CI history then shows the same cases in every run.
FAMILIES = ("RANK", "SYNC", "NUM", "MEM", "HANG", "SLOW", "HLTH", "RCP", "DATA")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_json(verdict: Verdict, run: str | None) -> str:
    """Return the verdict as one JSON object; `run` is the run directory."""
    record: dict[str, Any] = {
        "verdict": verdict.word.value,
        "exit_code": verdict.exit_code,
        "findings": [json.loads(finding.to_json()) for finding in (*verdict.failing, *verdict.others)],
        "ranks": {str(rank): _rank(verdict, rank) for rank in verdict.ranks},
        "blamed": list(verdict.blamed),
        "notes": list(verdict.notes),
        "run": run,
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def to_junit(verdict: Verdict, run: str | None) -> str:
    """Return the verdict as JUnit XML: one test case for each family of findings, and one for the script itself."""
    suite = ET.Element("testsuite", name="ddpdebug")
    _script_case(suite, verdict, run)
    watched = {rule.code.rstrip("0123456789") for rule in catalog()}
    for family in FAMILIES:
        case = ET.SubElement(suite, "testcase", classname="ddpdebug", name=family)
        failing = [finding for finding in verdict.failing if _family(finding) == family]
        others = [finding for finding in verdict.others if _family(finding) == family]
        if failing:
            _properties(case, failing[0])
        for finding in failing:
            message = _clean(f"{finding.code} {finding.title}")
            failure = ET.SubElement(case, "failure", type=finding.code, message=message)
            failure.text = _clean(describe(finding))
        if family not in watched and not failing and not others:
            ET.SubElement(case, "skipped", message="no rule of this family exists yet")
        if others:
            ET.SubElement(case, "system-out").text = _clean("\n\n".join(map(describe, others)))
    cases = list(suite)
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    suite.set("errors", str(sum(case.find("error") is not None for case in cases)))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def describe(finding: Finding) -> str:
    """Return a finding as plain lines: what, where, evidence, causes, what to do."""
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


def _script_case(suite: ET.Element, verdict: Verdict, run: str | None) -> None:
    case = ET.SubElement(suite, "testcase", classname="ddpdebug", name="script")
    if run is not None:
        _property(ET.SubElement(case, "properties"), "run", run)
    if verdict.word in {Word.FAILED, Word.HANG, Word.LOST}:
        who = ", ".join(map(str, verdict.blamed))
        error = ET.SubElement(case, "error", type=verdict.word.value, message=f"{verdict.word.value}: ranks {who}")
        error.text = _clean("\n".join(f"rank {rank}: {words}" for rank, words in verdict.ranks.items()))


def _properties(case: ET.Element, finding: Finding) -> None:
    element = ET.SubElement(case, "properties")
    _property(element, "step", "" if finding.step is None else str(finding.step))
    _property(element, "rank", ",".join(map(str, finding.ranks)))
    _property(element, "subject", ",".join(finding.subject))


def _property(element: ET.Element, name: str, value: str) -> None:
    ET.SubElement(element, "property", name=name, value=_clean(value))


def _family(finding: Finding) -> str:
    return finding.code.rstrip("0123456789")


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)
