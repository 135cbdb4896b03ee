"""Verdicts in the formats of CI services: Markdown summary, GitHub annotations, GitLab code quality. Torch-free.

Builds text, writes nothing. Names and messages come from the job, so each format's own escaping is applied to all of
them: a parameter that is called like a workflow command stays a name.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
from pathlib import PurePosixPath
from typing import Any

from ddpdebug.ci.json_junit import describe
from ddpdebug.ci.verdict import Verdict, Word
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks.text import subjects, where
from ddpdebug.sinks.words import clean, counted, culprits_text

#: GitHub shows ten errors of a step and drops the rest.
MAX_ANNOTATIONS = 10
#: A summary of GitHub has at most 1 MiB; people read the first findings.
_MAX_FINDINGS = 20
_MAX_TEXT = 20_000
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#!|~@$])")
_LOCATION = re.compile(r"(?P<file>.+):(?P<line>[0-9]{1,9})")
_GITLAB_SEVERITY = {
    Severity.INFO: "info",
    Severity.WARNING: "minor",
    Severity.ERROR: "major",
    Severity.CRITICAL: "critical",
}


def to_markdown(verdict: Verdict, run: str | None) -> str:
    """Return a summary: the verdict, a table of findings, the end of each rank, the findings in full."""
    fine = "⚠️" if verdict.word is Word.UNCHECKED else "✅"
    sign = fine if verdict.exit_code == 0 else "❌"
    counts = f"{counted(len(verdict.failing), 'finding')} at or above the threshold, {len(verdict.others)} below it"
    about = f"exit code {verdict.exit_code} · {len(verdict.ranks)} ranks · {counts}"
    lines = [f"## {sign} ddpdebug: {verdict.title}", "", about, ""]
    shown = [*verdict.failing, *verdict.others][:_MAX_FINDINGS]
    if shown:
        lines += ["| finding | | step | ranks | parameter | place |", "| --- | --- | --- | --- | --- | --- |"]
        lines += [_row(finding) for finding in shown]
        more = len(verdict.failing) + len(verdict.others) - len(shown)
        lines += ["", *([f"and {more} more in the run directory", ""] if more else [])]
    if verdict.story:
        lines += [f"- {_markdown(words)}" for words in verdict.story] + [""]
    elif verdict.blamed:
        lines += [f"- {who}: {_markdown(words)}" for who, words in verdict.ends(verdict.blamed).items()] + [""]
    lines += [f"- not checked: {_markdown(words)}" for words in verdict.unchecked] + ([""] if verdict.unchecked else [])
    lines += [f"- {_markdown(note)}" for note in verdict.notes] + ([""] if verdict.notes else [])
    for finding in verdict.failing[:_MAX_FINDINGS]:
        text = html.escape(describe(finding)[:_MAX_TEXT])
        lines += [f"<details><summary>{html.escape(clean(finding.code, 40))}</summary>", "", f"<pre>{text}</pre>", ""]
        lines += ["</details>", ""]
    if run is not None:
        lines += [f"run directory: {_markdown(run)}", ""]
    return "\n".join(lines)


def to_github(verdict: Verdict, root: str | None = None) -> list[str]:
    """Return the workflow commands that annotate a pull request: one for each cause, at most ten.

    Args:
        root: the folder of the checkout; files below it are named from there, as GitHub expects.
    """
    lines = []
    if verdict.word in {Word.FAILED, Word.HANG, Word.LOST}:
        lines.append(f"::error title={_property(f'ddpdebug: {verdict.word.value}')}::{_message(_blamed(verdict))}")
    for finding in verdict.failing:
        file, line = located(finding, root)
        title = f"{clean(finding.code, 40)} {clean(finding.title, 200)}"
        place = f"file={_property(file)},line={line}," if file else ""
        lines.append(f"::error {place}title={_property(title)}::{_message(describe(finding)[:4000])}")
    kind = "error" if verdict.fails_unchecked else "warning"
    lines += [f"::{kind} title=ddpdebug%3A not checked::{_message(clean(words))}" for words in verdict.unchecked]
    return lines[:MAX_ANNOTATIONS]


def to_codequality(verdict: Verdict, script: str, root: str | None = None) -> str:
    """Return GitLab's code quality report; a finding without a line of the user's code is put at the script's first."""
    entries: list[dict[str, Any]] = []
    for finding in (*verdict.failing, *verdict.others):
        file, line = located(finding, root)
        text = " · ".join(part for part in (where(finding), ", ".join(subjects(finding))) if part)
        entries.append(
            {
                "description": f"{clean(finding.code, 40)} {clean(finding.title)}{f': {text}' if text else ''}",
                "check_name": clean(finding.code, 40),
                "fingerprint": fingerprint(finding, root),
                "severity": _GITLAB_SEVERITY[finding.severity],
                "location": {"path": file or relative(clean(script), root), "lines": {"begin": line or 1}},
            }
        )
    if verdict.word in {Word.FAILED, Word.HANG, Word.LOST}:
        entries.append(
            {
                "description": f"{verdict.word.value}: {_blamed(verdict)}",
                "check_name": "script",
                "fingerprint": hashlib.sha256(verdict.word.value.encode()).hexdigest(),
                "severity": "blocker",
                "location": {"path": relative(clean(script), root), "lines": {"begin": 1}},
            }
        )
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def _blamed(verdict: Verdict) -> str:
    if verdict.story:
        return "; ".join(verdict.story)
    return "; ".join(f"{who}: {clean(words, 400)}" for who, words in verdict.ends(verdict.blamed).items())


def fingerprint(finding: Finding, root: str | None) -> str:
    """Return an identity of the finding that stays the same in the next commit: without the step, which moves."""
    file, line = located(finding, root)
    place = f"{file}:{line}" if file else finding.location or ""
    parts = (finding.code, finding.subject[0] if finding.subject else "", place)
    return hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace")).hexdigest()


def located(finding: Finding, root: str | None) -> tuple[str, int]:
    """Return a finding's file, relative to the checkout if it lies there, and its line; an empty file if unknown."""
    found = _LOCATION.fullmatch(clean(finding.location or ""))
    return (relative(found["file"], root), max(1, int(found["line"]))) if found else ("", 0)


def relative(file: str, root: str | None) -> str:
    """Return a path relative to the checkout's folder if it lies there."""
    path = PurePosixPath(os.path.normpath(file)) if file else PurePosixPath()
    if root and path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    return str(path)


def _row(finding: Finding) -> str:
    cells = (
        f"{clean(finding.code, 40)} {clean(finding.title, 200)}",
        finding.severity.label,
        "" if finding.step is None else str(finding.step),
        culprits_text(finding).partition(" ")[2] if finding.ranks else "",
        ", ".join(subjects(finding)),
        clean(finding.location or "", 200),
    )
    return f"| {' | '.join(map(_markdown, cells))} |"


def _markdown(text: str) -> str:
    """Return plain text that neither Markdown nor HTML takes for its own."""
    return _MARKDOWN.sub(r"\\\1", html.escape(clean(text), quote=False))


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
