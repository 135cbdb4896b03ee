"""Renders a finding with rich, for terminals; loaded when the first one is shown. Torch-free."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks.text import Part, clean

_BADGE = {
    Severity.INFO: "bold black on cyan",
    Severity.WARNING: "bold black on yellow",
    Severity.ERROR: "bold white on red",
    Severity.CRITICAL: "bold white on red",
}
_INDENT = 12
_LINE = {"what": "bold", "perhaps": "dim", "where": "cyan"}


def styled_block(finding: Finding, title: str, content: list[Part], *, width: int, color: bool) -> str:
    """Return the block as text with the terminal's escape codes. Texts are never read as rich's markup."""
    head = Text.assemble(
        (f" {clean(finding.code, 20)} " if color else f"{clean(finding.code, 20)}", _BADGE[finding.severity]),
        (f" {finding.severity.label}  ", "bold"),
        (title, "bold"),
        "  ddpdebug",
    )
    head.stylize("dim", len(head) - len("ddpdebug"))
    target = io.StringIO()
    console = Console(
        file=target,
        width=width,
        force_terminal=True,
        color_system="standard" if color else None,
        legacy_windows=False,
        highlight=False,
        emoji=False,
    )
    console.print(head, soft_wrap=True)
    for label, lines in content:
        for i, line in enumerate(lines):
            style = "bold green" if line.startswith("ddpdebug explain ") else _LINE.get(label, "")
            for j, part in enumerate(Text(line, style).wrap(console, width - _INDENT, overflow="fold")):
                part.rstrip()
                margin = f"  {label if i == j == 0 else ''}".ljust(_INDENT)
                console.print(Text.assemble((margin, "dim"), part), soft_wrap=True)
    return target.getvalue()
