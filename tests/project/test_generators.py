"""Generators of ours: none is ended early, and none is made a tuple.

What a trace function of the script's raises as Python ends a generator is lost. A tuple of unknown length grows as it
is filled, which fails while somebody else refers to it: `gc.get_objects()` of the script's does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).resolve().parents[2] / "ddpdebug"
#: What runs in the training thread between two lines of the script's.
_ROOMS = ("probes", "isolation", "instrument", "torch_internals")
_FILES = ("nested.py", "fingerprint.py", "devices.py", "monitor/monitor.py", "monitor/sampling.py")
#: What runs in a rank, in any thread.
_IN_A_RANK = (*_ROOMS, "schema", "exchange", "monitor", "progress", "forensics", "config", "sinks", "run_directory")
_LAZY = {"map", "filter", "zip", "enumerate"}


def ended(tree: ast.AST) -> Iterator[int]:
    """Yield the lines in which a generator expression is dropped before its end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"any", "all", "next"}:
            yield from [node.lineno for given in node.args if isinstance(given, ast.GeneratorExp)]


def grown(tree: ast.AST) -> Iterator[int]:
    """Yield the lines in which a tuple is made of what has no length."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tuple":
            for given in node.args:
                lazy = isinstance(given, ast.Call) and isinstance(given.func, ast.Name) and given.func.id in _LAZY
                if isinstance(given, ast.GeneratorExp) or lazy:
                    yield given.lineno


@pytest.mark.parametrize("room", _IN_A_RANK)
def test_no_tuple_grows(room: str) -> None:
    """`tuple([...])`, or `(*map(...),)`."""
    files = sorted((_PACKAGE / room).rglob("*.py"))
    found = [f"{file.relative_to(_PACKAGE)}:{line}" for file in files for line in grown(ast.parse(file.read_text()))]
    assert found == []


def test_a_tuple_that_grows_is_seen() -> None:
    """Of an expression or of a call."""
    text = "tuple(x for x in y)\ntuple([x for x in y])\ntuple(map(f, y))\n(*map(f, y),)\ntuple(sorted(y))\n"
    assert list(grown(ast.parse(text))) == [1, 3]


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
