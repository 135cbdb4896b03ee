"""The preflight's lines with the terminal's colours; loaded when a terminal asks for them. Torch-free."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ddpdebug.preflight.output.results import Check
from ddpdebug.preflight.output.text import report

#: The colours of lines differ in brightness too.
_STYLES = {
    "pass": "green",
    "warn": "bold black on yellow",
    "fail": "bold white on red",
    "info": "cyan",
    "skipped": "dim",
    "command": "bold green",
    "series 0": "blue",
    "series 1": "yellow",
    "series 2": "green",
    "series 3": "magenta",
    "series 4": "red",
    "series 5": "cyan",
}


def styled(checks: Sequence[Check], width: int = 100) -> str:
    """Return the lines with escape codes. Texts are never read as rich's markup."""
    target = io.StringIO()
    console = Console(
        file=target,
        width=width,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
        highlight=False,
        emoji=False,
    )
    for line in report(checks, width, color=True):
        pieces = [(text, _STYLES.get(style, style)) for text, style in line]
        console.print(Text.assemble(*pieces), soft_wrap=True)
    return target.getvalue()
