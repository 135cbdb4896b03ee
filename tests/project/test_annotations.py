"""Every function says what it returns. Sizes are printed by `make size`: an alarm that a person reads, no limit."""

from __future__ import annotations

import ast
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent.parent / "ddpdebug"


def test_returns_are_annotated() -> None:
    """Every function says what it returns."""
    bare = [
        f"{file.relative_to(_PACKAGE)}:{node.lineno} {node.name}"
        for file in sorted(_PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None
    ]
    assert bare == []
