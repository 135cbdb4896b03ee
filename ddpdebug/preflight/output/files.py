"""Writes the results of a preflight: preflight.json, junit.xml and preflight.html.

`to_json`, `to_junit` are pure; `write` is the only one that touches the disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree as ET

from ddpdebug.ci.json_junit import EPOCH, add_property, add_suite, document, new_case, xml_text
from ddpdebug.clock import time
from ddpdebug.preflight.output.page import page
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.schema.finding import strict
from ddpdebug.sinks.text import evidence_lines
from ddpdebug.sinks.words import clean


def write(checks: Sequence[Check], directory: Path, title: str) -> list[Path]:
    """Write the files into a directory, made if missing; return the files.

    Raises:
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "preflight.json": to_json(checks, title),
        "junit.xml": to_junit(checks, at=time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())),
        "preflight.html": page(checks, title),
    }
    written = []
    for name, text in texts.items():
        file = directory / name
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
        written.append(file)
    return written


def to_json(checks: Sequence[Check], title: str) -> str:
    """Return the results as one strict JSON object: `nan`, `inf` and `-inf` are texts."""
    counts = {status.value: sum(check.status is status for check in checks) for status in Status}
    record = {"title": title, "counts": counts, "checks": [strict(asdict(check)) for check in checks]}
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_junit(checks: Sequence[Check], *, at: str = EPOCH) -> str:
    """Return JUnit XML: a suite for each group, a case for each check. A warning is no failure.

    Args:
        at: when the preflight ended, ISO 8601 without a zone.
    """
    root = ET.Element("testsuites")
    for group, members in groupby(checks, lambda check: check.group):
        properties, cases, notes = ET.Element("properties"), [], []
        for check in members:
            case = new_case(clean(check.name, 200))
            words = xml_text(clean(f"{check.code} {check.summary}".strip()))
            if check.status is Status.FAIL:
                failure = ET.SubElement(case, "failure", type=xml_text(check.code or "preflight"), message=words)
                failure.text = xml_text(_described(check))
                add_property(properties, clean(check.name, 200), check.code)
            elif check.status is Status.SKIPPED:
                ET.SubElement(case, "skipped", message=words)
            else:
                notes.append(_described(check) if check.status is Status.WARN else f"{check.name}: {words}")
            cases.append(case)
        add_suite(root, clean(group, 200), at, properties, cases, "\n\n".join(notes))
    return document(root)


def _described(check: Check) -> str:
    lines = [f"{check.code} {check.status.value}: {check.group}: {clean(check.name)}".strip(), clean(check.summary)]
    lines += [f"evidence: {line}" for line in evidence_lines(check.evidence)]
    lines += [f"perhaps: {clean(cause)}" for cause in check.hypotheses]
    lines += [f"next: {clean(action)}" for action in check.actions]
    return "\n".join(lines)
