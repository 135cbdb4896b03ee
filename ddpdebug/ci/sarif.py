"""A verdict as SARIF 2.1.0, which code scanning services and editors read. Torch-free; builds text, writes nothing."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from ddpdebug._version import __version__
from ddpdebug.ci.github_gitlab import fingerprint, located, relative
from ddpdebug.ci.json_junit import describe
from ddpdebug.ci.verdict import Verdict, Word
from ddpdebug.detectors.catalog import FAMILIES
from ddpdebug.detectors.pages import Page, pages
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks.words import clean

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {
    Severity.INFO: "note",
    Severity.WARNING: "warning",
    Severity.ERROR: "error",
    Severity.CRITICAL: "error",
}
#: By it services know that a path begins at the root of the repository.
_ROOT = "%SRCROOT%"
_MAX_TEXT, _MAX_CODE, _MAX_SUBJECTS, _MAX_RANKS = 8000, 40, 10, 1024


def to_sarif(verdict: Verdict, script: str, root: str | None = None) -> str:
    """Return the verdict as a log of one run: a result for each finding, a rule for each code that was found.

    A finding without a line of the user's code stands at the script, without a line. What is no finding (a script that
    failed, what was not checked, notes) stands among the notifications of the invocation.

    Args:
        root: the folder of the checkout; files below it are named from there.
    """
    findings = (*verdict.failing, *verdict.others)
    codes = sorted({clean(finding.code, _MAX_CODE) for finding in findings})
    known = pages()
    run = {
        "tool": {
            "driver": {
                "name": "ddpdebug",
                "version": __version__,
                "rules": [_rule(code, known.get(code)) for code in codes],
            }
        },
        "invocations": [_invocation(verdict)],
        "results": [_result(f, codes.index(clean(f.code, _MAX_CODE)), script, root) for f in findings],
        "columnKind": "unicodeCodePoints",
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(code: str, page: Page | None) -> dict[str, Any]:
    if page is None:  # of another version, or of a directory that somebody else has made
        return {"id": code}
    parts = [(name, [lead + text for lead, text in paragraphs]) for name, paragraphs in page.sections()]
    family = code.rstrip("0123456789")
    return {
        "id": code,
        "shortDescription": {"text": page.title},
        "fullDescription": {"text": " ".join(parts[0][1])},
        "help": {
            "text": "\n\n".join("\n".join((f"{name}:", *lines)) for name, lines in parts),
            "markdown": "\n\n".join("\n".join((f"**{name.capitalize()}**", "", *lines)) for name, lines in parts),
        },
        "defaultConfiguration": {"level": _LEVELS[page.severity]},
        "properties": {"tags": [FAMILIES.get(family, family)]},
    }


def _result(finding: Finding, rule: int, script: str, root: str | None) -> dict[str, Any]:
    file, line = located(finding, root)
    place: dict[str, Any] = {"artifactLocation": _artifact(file or relative(clean(script), root))}
    if file:
        place["region"] = {"startLine": line}
    location: dict[str, Any] = {"physicalLocation": place}
    if names := dict.fromkeys(map(clean, finding.subject[:_MAX_SUBJECTS])):
        location["logicalLocations"] = [{"fullyQualifiedName": name} for name in names]
    about = {"severity": finding.severity.label, "step": finding.step, "ranks": list(finding.ranks[:_MAX_RANKS])}
    return {
        "ruleId": clean(finding.code, _MAX_CODE),
        "ruleIndex": rule,
        "level": _LEVELS[finding.severity],
        "message": {"text": describe(finding)[:_MAX_TEXT]},
        "locations": [location],
        "partialFingerprints": {"ddpdebug/v1": fingerprint(finding, root)},
        "properties": about,
    }


def _artifact(file: str) -> dict[str, str]:
    path = PurePosixPath(file)
    if path.is_absolute():
        return {"uri": f"file://{quote(file)}"}
    return {"uri": quote(file), "uriBaseId": _ROOT}


def _invocation(verdict: Verdict) -> dict[str, Any]:
    """Return how the job ended; the check itself has worked where it has a verdict about findings."""
    failed = verdict.word in {Word.FAILED, Word.HANG, Word.LOST, Word.DAMAGED}
    told = [("error", f"{verdict.word.value}: {words}") for words in _ends(verdict)] if failed else []
    kind = "error" if verdict.fails_unchecked else "warning"
    told += [(kind, f"not checked: {words}") for words in verdict.unchecked]
    told += [("note", note) for note in verdict.notes]
    return {
        "executionSuccessful": not failed,
        "exitCode": verdict.exit_code,
        "exitCodeDescription": verdict.title,
        "toolExecutionNotifications": [
            {"level": level, "message": {"text": clean(words, _MAX_TEXT)}} for level, words in told
        ],
    }


def _ends(verdict: Verdict) -> list[str]:
    return list(verdict.story) or [f"{who}: {words}" for who, words in verdict.ends(verdict.blamed).items()]
