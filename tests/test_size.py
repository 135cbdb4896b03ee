"""Guards the tail: long functions, long files, a growing core. `make size` prints the table."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from statistics import median, quantiles

_PACKAGE = Path(__file__).parent.parent / "ddpdebug"
_MAX_FUNCTION, _MAX_FILE, _MAX_CORE = 60, 400, 1000
_P90_FUNCTION, _MEDIAN_FILE = 30, 130
_LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}
#: The pure layers without the rules.
_CORE = ("observations", "findings", "steps", "details", "diagnosis", "causes", "detectors/base", "detectors/catalog")


def _files() -> dict[str, str]:
    return {
        str(file.relative_to(_PACKAGE).with_suffix("")): file.read_text(encoding="utf-8")
        for file in sorted(_PACKAGE.rglob("*.py"))
    }


def _functions(source: str) -> dict[str, int]:
    """Return the lines of each function, docstring and decorators included."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[f"{node.name}:{node.lineno}"] = (node.end_lineno or first) - first + 1
    return found


def _code_lines(source: str) -> int:
    """Count the lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _LAYOUT:
            before = token.type if token.type != tokenize.COMMENT else before
            continue
        docstring = token.type == tokenize.STRING and before in _LAYOUT
        before = token.type
        if not docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def test_functions() -> None:
    """No function has more than 60 lines, nine in ten have at most 30."""
    lengths = {f"{name}.{key}": n for name, text in _files().items() for key, n in _functions(text).items()}
    p90 = quantiles(lengths.values(), n=10)[-1]
    print(f"functions: {len(lengths)}, median {median(lengths.values())}, p90 {p90}, max {max(lengths.values())}")
    assert {name: n for name, n in lengths.items() if n > _MAX_FUNCTION} == {}
    assert p90 <= _P90_FUNCTION


def test_files() -> None:
    """No file has more than 400 lines, half have at most 130."""
    lengths = {name: text.count("\n") for name, text in _files().items()}
    print(f"files: {len(lengths)}, median {median(lengths.values())}, max {max(lengths.values())}")
    assert {name: n for name, n in lengths.items() if n > _MAX_FILE} == {}
    assert median(lengths.values()) <= _MEDIAN_FILE


def test_core() -> None:
    """The pure layers without the rules stay readable in one sitting."""
    lines = {name: _code_lines(text) for name, text in _files().items() if name in _CORE}
    print(f"core: {sum(lines.values())} lines of code {lines}")
    assert sum(lines.values()) <= _MAX_CORE


def test_returns_are_annotated() -> None:
    """Every function says what it returns."""
    bare = [
        f"{name}:{node.lineno} {node.name}"
        for name, text in _files().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None
    ]
    assert bare == []
