"""`ddpdebug explain`: the runbook of a finding code."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import fill

import click

from ddpdebug.commands._target import plain_console
from ddpdebug.detectors.nature import usual
from ddpdebug.detectors.pages import Page, pages
from ddpdebug.errors import UsageError, did_you_mean
from ddpdebug.schema.likeliest import untagged

_TEXT = """Print what a finding code means: impact, how to look closer, likely causes, what to do.

Without CODE, list all codes.
"""
_WIDTH = 110


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
    for name, paragraphs in page.sections():
        console.print()
        console.print(Text(name, "bold cyan"))
        if name == "causes" and any(untagged(paragraph) != paragraph for _, paragraph in paragraphs):
            console.print(Text("  (before a colon: the phase, or words of the evidence, that speak for it)", "dim"))
        for lead, paragraph in paragraphs:
            text = fill(paragraph, console.width, initial_indent=f"  {lead}", subsequent_indent="  " + " " * len(lead))
            console.print(Text(text), soft_wrap=True)
    if found := usual(page.code):
        console.print()
        console.print(Text("does a restart help?", "bold cyan"))
        console.print(Text(f"  mostly {found.value}: {found.advice}"), soft_wrap=True)


@click.command("explain", help=_TEXT)
@click.argument("code", required=False)
def command(code: str | None) -> Callable[[], int]:
    """Find the code's page, and return the action that prints it, to be run outside of click."""
    known = pages()
    page = None if code is None else _page(known, code)

    def act() -> int:
        if page is None:
            _print_list(known)
        else:
            _print_page(page)
        return 0

    return act
