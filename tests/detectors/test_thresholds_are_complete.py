"""The table of thresholds is complete: a rule about training compares with nothing that is not in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpdebug.detectors
from ddpdebug.detectors.thresholds import thresholds

_DETECTORS = Path(ddpdebug.detectors.__file__).parent
_FILES = sorted(_DETECTORS.glob("*/[!_]*.py"))
#: How often a rule looks, and how much it remembers, decide nothing.
_CAPACITIES = {"_EVERY", "_KEPT", "KEPT", "HISTORY", "_HISTORY"}
#: Small numbers count and halve; larger ones, and fractions, are decisions. 1e-9 and the like stand in for 0.
_COUNTS = {-1, 0, 1, 2}
_NOTHING = 1e-8
#: Numbers that are no limits: three blocks have two differences, units of bytes, rounding of what is computed twice.
_OTHERS = {"growth": {"3"}, "sizes": {"1000"}, "sync206_changed_after_reduction": {"6", "_UNCHANGED"}}


def _numbers(tree: ast.Module) -> set[str]:
    """Return the module's names that stand for numbers."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(part, ast.Constant) and isinstance(part.value, int | float) for part in ast.walk(node.value)
        ):
            targets = [part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            names.update(name for name in targets if not isinstance(node.value, ast.Dict | ast.DictComp | ast.Call))
    return names


def undeclared(tree: ast.Module) -> Iterator[str]:
    """Yield the numbers that the functions of a module compare with, and that no table knows."""
    names = _numbers(tree) - _CAPACITIES
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for compare in {node for function in functions for node in ast.walk(function) if isinstance(node, ast.Compare)}:
        for part in ast.walk(compare):
            if isinstance(part, ast.Name) and part.id in names:
                yield f"line {part.lineno}: {part.id}"
            number = part.value if isinstance(part, ast.Constant) else None
            if isinstance(number, int | float) and number not in _COUNTS and number > _NOTHING:
                yield f"line {part.lineno}: {number}"


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_no_rule_compares_with_a_number_of_its_own(file: Path) -> None:
    """What a rule decides by can be read in one table, and adjusted."""
    found = {what.partition(": ")[2] for what in undeclared(ast.parse(file.read_text(encoding="utf-8")))}
    assert sorted(found - _OTHERS.get(file.stem, set())) == []


def test_a_number_of_its_own_is_seen() -> None:
    """The check itself works."""
    source = "LIMIT, MORE = 3, 4\ndef f(x):\n    return x > LIMIT or x * 0.5 < 7 or x == 2 or x > 1e-12"
    assert sorted(undeclared(ast.parse(source))) == ["line 3: 0.5", "line 3: 7", "line 3: LIMIT"]


@pytest.mark.smoke
def test_every_threshold_is_used() -> None:
    """A rule decides by each of them."""
    folders = (_DETECTORS, _DETECTORS.parent / "diagnosis")
    text = "".join(file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py"))
    used = r"(self|rule|flat|spike)\.{0}\b|{0} = enough|\.{0}\.within\("
    assert [name for name in thresholds() if not re.search(used.format(name), text)] == []
