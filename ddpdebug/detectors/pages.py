"""The page of each finding code: what `explain` prints, and what other formats carry as a rule's help. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpdebug.detectors.base import runbook
from ddpdebug.detectors.catalog import catalog, planned
from ddpdebug.schema.finding import Severity

#: The parts of a page, in the order in which people read them.
SECTIONS = ("meaning", "impact", "diagnosis", "causes", "remedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What is known of one code."""

    code: str
    severity: Severity
    title: str
    prose: dict[str, Any]  # as `runbook` returns it
    detected: bool
    found_by: str = ""  # the command that finds it, where no rule does while training

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return each part that says something: its name, and its paragraphs with what stands before them."""
        return [(name, _paragraphs(body, numbered=name == "causes")) for name in SECTIONS if (body := self.prose[name])]


def pages() -> dict[str, Page]:
    """Return every code of the catalogue, sorted, whether or not it is detected yet."""
    found = {
        rule.code: Page(
            code=rule.code,
            severity=rule.severity,
            title=rule.title,
            prose=runbook(rule),
            detected=True,
        )
        for rule in catalog()
    }
    for code, table in planned().items():
        found[code] = Page(
            code=code,
            severity=table["severity"],
            title=table["title"],
            prose={**dict.fromkeys(SECTIONS, ""), **table},
            detected="found_by" in table,
            found_by=table.get("found_by", ""),
        )
    return dict(sorted(found.items()))


def _paragraphs(body: str | list[str], *, numbered: bool) -> list[tuple[str, str]]:
    """Return the paragraphs on one line each, with what stands before them."""
    if isinstance(body, str):
        return [("", " ".join(part.split())) for part in body.split("\n\n")]
    return [(f"{i}. " if numbered else "- ", " ".join(item.split())) for i, item in enumerate(body, 1)]
