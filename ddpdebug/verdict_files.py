"""A verdict as JSON and as JUnit XML. Torch-free; builds text, writes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree as ET

from ddpdebug.detectors.catalog import catalog
from ddpdebug.findings import Finding
from ddpdebug.golden import Comparison
from ddpdebug.selftest import Proof
from ddpdebug.sinks.text import clean, parts
from ddpdebug.verdict import Verdict, Word

#: One test case each, whether or not the family has findings: a CI history then shows the same cases in every run.
FAMILIES = ("RANK", "SYNC", "NUM", "MEM", "HANG", "SLOW", "HLTH", "RCP", "DATA")
#: The time of a document that nobody dated.
_EPOCH = "1970-01-01T00:00:00"
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
        "self_test": [
            {"fault": p.fault.name, "expected": list(p.fault.expected), "found": list(p.found), "verified": p.verified}
            for p in verdict.proofs
        ],
        "golden": None if verdict.golden is None else asdict(verdict.golden),
        "run": run,
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def to_junit(verdict: Verdict, run: str | None, *, time: str = _EPOCH) -> str:
    """Return the verdict as JUnit XML: a suite with one test case for each family of findings, and one for the script.

    Consumers differ in what they accept. This is what the strictest of the schemas in use allows: properties belong to
    the suite, a case has one failure, and every suite says when and how long it ran.

    Args:
        time: when the check ended, ISO 8601 without a zone.
    """
    root = ET.Element("testsuites")
    rules = {rule.code.rstrip("0123456789") for rule in catalog()}
    for name in ("script", *FAMILIES):
        case = _case(name)
        properties, output = ET.Element("properties"), ""
        if name == "script":
            _script_case(case, properties, verdict, run)
        else:
            output = _family_case(case, properties, verdict, name)
            if name not in rules and not len(case) and not output:
                ET.SubElement(case, "skipped", message="no rule of this family exists yet")
        _suite(root, name, time, properties, [case], output)
    if verdict.proofs:
        _suite(root, "self-test", time, ET.Element("properties"), list(map(_proof_case, verdict.proofs)), "")
    if verdict.golden is not None:
        case, properties = _case("golden"), ET.Element("properties")
        _golden_case(case, properties, verdict.golden)
        _suite(root, "golden", time, properties, [case], "")
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(
    root: ET.Element, name: str, time: str, properties: ET.Element, cases: Sequence[ET.Element], output: str
) -> None:
    suite = ET.SubElement(root, "testsuite", id=str(len(root)), name=name, package="ddpdebug", hostname="localhost")
    suite.attrib.update(timestamp=time, time="0", tests=str(len(cases)))
    for count, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(kind) is not None for case in cases)))
    suite.extend((properties, *cases))
    ET.SubElement(suite, "system-out").text = _clean(output)
    ET.SubElement(suite, "system-err")


def _case(name: str) -> ET.Element:
    return ET.Element("testcase", classname="ddpdebug", name=name, time="0")


def _proof_case(proof: Proof) -> ET.Element:
    case = _case(proof.fault.name)
    if not proof.verified:
        words = _clean(proof.words)
        ET.SubElement(case, "failure", type="self-test", message=words).text = f"{proof.fault.meaning}: {words}"
    return case


def _golden_case(case: ET.Element, properties: ET.Element, found: Comparison) -> None:
    if found.what is not None:
        _property(properties, "step", "" if found.step is None else str(found.step))
        _property(properties, "parameter", found.parameter or "")
        words = _clean(clean(found.words))
        ET.SubElement(case, "failure", type="golden", message=words).text = words


def _family_case(case: ET.Element, properties: ET.Element, verdict: Verdict, name: str) -> str:
    """Fill in the case of a family: the first finding is the gravest, the earliest cause; return the findings below."""
    failing = [finding for finding in verdict.failing if family(finding) == name]
    others = [finding for finding in verdict.others if family(finding) == name]
    if failing:
        first = failing[0]
        _property(properties, "step", "" if first.step is None else str(first.step))
        _property(properties, "rank", ",".join(map(str, first.ranks)))
        _property(properties, "parameter", ",".join(first.subject))
        message = _clean(f"{first.code} {clean(first.title)}")
        failure = ET.SubElement(case, "failure", type=_clean(first.code), message=message)
        failure.text = _clean("\n\n".join(map(describe, failing)))
    return "\n\n".join(map(describe, others))


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


def _script_case(case: ET.Element, properties: ET.Element, verdict: Verdict, run: str | None) -> None:
    if run is not None:
        _property(properties, "run", run)
    if verdict.word in {Word.FAILED, Word.HANG, Word.LOST}:
        who = ", ".join(map(str, verdict.blamed))
        _property(properties, "rank", who.replace(" ", ""))
        error = ET.SubElement(case, "error", type=verdict.word.value, message=f"{verdict.word.value}: ranks {who}")
        error.text = _clean("\n".join(f"rank {rank}: {clean(words)}" for rank, words in verdict.ranks.items()))


def _property(element: ET.Element, name: str, value: str) -> None:
    ET.SubElement(element, "property", name=name, value=_clean(value))


def family(finding: Finding) -> str:
    """Return the letters of a finding's code."""
    return finding.code.rstrip("0123456789")


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)
