"""What a trace function of the script's raises as Python ends a generator is lost: none of ours is ended early."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).resolve().parents[2] / "ddpdebug"
#: What runs in the training thread between two lines of the script's.
_ROOMS = ("probes", "isolation", "instrument", "torch_internals")
_FILES = ("nested.py", "fingerprint.py", "devices.py", "monitor/monitor.py", "monitor/sampling.py")


def ended(tree: ast.AST) -> Iterator[int]:
    """Yield the lines in which a generator expression is dropped before its end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"any", "all", "next"}:
            yield from [node.lineno for given in node.args if isinstance(given, ast.GeneratorExp)]


@pytest.mark.parametrize("room", [*_ROOMS, *_FILES])
def test_no_generator_is_ended_early(room: str) -> None:
    """`any([...])` instead of `any(...)`, or a loop."""
    files = [_PACKAGE / room] if room.endswith(".py") else sorted((_PACKAGE / room).rglob("*.py"))
    found = [f"{file.relative_to(_PACKAGE)}:{line}" for file in files for line in ended(ast.parse(file.read_text()))]
    assert found == []


def test_a_generator_that_is_ended_is_seen() -> None:
    """In any of the three ways."""
    text = "any(x for x in y)\nall([x for x in y])\nnext((x for x in y), None)\n"
    assert list(ended(ast.parse(text))) == [1, 3]
