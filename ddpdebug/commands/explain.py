"""`ddpdebug explain`: the runbook of a finding code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import click

from ddpdebug.commands._target import plain_console
from ddpdebug.detectors.base import runbook
from ddpdebug.detectors.catalog import catalog, planned
from ddpdebug.errors import UsageError, did_you_mean
from ddpdebug.schema.finding import Severity

_TEXT = """Print what a finding code means: impact, how to look closer, likely causes, what to do.

Without CODE, list all codes.
"""
_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What is known of one code."""

    code: str
    severity: Severity
    title: str
    prose: dict[str, Any]  # as `runbook` returns it
    detected: bool
    found_by: str = ""  # the command that finds it, where no rule does while training


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
            prose=table,
            detected="found_by" in table,
            found_by=table.get("found_by", ""),
        )
    return dict(sorted(found.items()))


def _page(known: dict[str, Page], code: str) -> Page:
    page = known.get(code.upper())
    if page is None:
        near = did_you_mean(code.upper(), known, listed="`ddpdebug explain` lists all codes")
        raise UsageError(f"unknown code {code!r}; {near}")
    return page


def _print_list(known: dict[str, Page]) -> None:
    from rich.text import Text  # noqa: PLC0415 - not before it is needed

    console = plain_console(_WIDTH)
    family = ""
    for page in known.values():
        if family and not page.code.startswith(family):
            console.print()
        family = page.code.rstrip("0123456789")
        note = "" if page.detected else "  (not detected yet)"
        line = Text.assemble((f"{page.code:8}", "bold"), f"  {page.severity.label:8}  {page.title}", (note, "dim"))
        console.print(line, soft_wrap=True)


def _print_page(page: Page) -> None:
    from rich.text import Text  # noqa: PLC0415 - not before it is needed

    console = plain_console(_WIDTH)
    console.print(Text.assemble((page.code, "bold"), f"  {page.severity.label}  ", (page.title, "bold")))
    if not page.detected:
        console.print(Text("not detected yet: no rule of this version raises it", "yellow"))
    if page.found_by:
        console.print(Text(f"found by `ddpdebug {page.found_by}`, not while training", "cyan"))
    for name in ("meaning", "impact", "diagnosis", "causes", "remedy"):
        body = page.prose.get(name)
        if body:
            console.print()
            console.print(Text(name, "bold cyan"))
            for lead, paragraph in _paragraphs(body, numbered=name == "causes"):
                text = fill(
                    paragraph, console.width, initial_indent=f"  {lead}", subsequent_indent="  " + " " * len(lead)
                )
                console.print(Text(text), soft_wrap=True)


def _paragraphs(body: str | list[str], *, numbered: bool) -> list[tuple[str, str]]:
    """Return the paragraphs on one line each, with what stands before them."""
    if isinstance(body, str):
        return [("", " ".join(part.split())) for part in body.split("\n\n")]
    return [(f"{i}. " if numbered else "- ", " ".join(item.split())) for i, item in enumerate(body, 1)]


@click.command("explain", help=_TEXT)
@click.argument("code", required=False)
def command(code: str | None) -> Callable[[], int]:
    """Find the code's page; print it later, outside of click."""
    known = pages()
    page = None if code is None else _page(known, code)

    def act() -> int:
        if page is None:
            _print_list(known)
        else:
            _print_page(page)
        return 0

    return act
