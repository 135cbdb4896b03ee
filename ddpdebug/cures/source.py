"""A Python file that is edited at nodes of its syntax tree; everything else stays as it is, byte by byte.

Torch-free; reads text, writes nothing.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from typing import Any

#: Where a line begins for programs that apply diffs, whatever else ends lines elsewhere.
_AFTER_END = re.compile(r"(?<=\n)(?!\Z)")
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)


class CannotError(Exception):
    """There is no cure; the text says why."""


class Source:
    """The text of a Python file, and edits of it.

    Raises:
        CannotError: it is no Python in UTF-8.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self.text = data.decode("utf-8")
            self.tree = ast.parse(self.text)
        except (ValueError, SyntaxError, RecursionError):
            raise CannotError("the file is no Python in UTF-8") from None
        self._data = data
        self._newline = b"\r\n" if b"\r\n" in data else b"\n"
        self._starts = [0]
        for line in data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._edits: list[tuple[int, int, bytes]] = []

    # --- looking ------------------------------------------------------------------------------------------------------

    def statement(self, line: int) -> ast.stmt:
        """Return the innermost statement on a line."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
        if not found:
            raise CannotError(f"there is no statement on line {line}")
        return min(found, key=lambda node: (node.end_lineno or 0) - node.lineno)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the statement that holds an expression."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the ancestors of a node, from the inside out."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def loop(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost loop around a node in its function; None if there is none."""
        for each in self.around(node):
            if isinstance(each, _LOOPS):
                return each
            if isinstance(each, _SCOPES):
                return None
        return None

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function around a node, or the module."""
        return next(each for each in self.around(node) if isinstance(each, _SCOPES))

    def calls(self, within: ast.AST | None = None) -> Iterator[tuple[str, ast.Call]]:
        """Yield the calls, each with the text of the function: `torch.optim.SGD`."""
        for node in ast.walk(within or self.tree):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node

    def assigned(self, name: str) -> list[str]:
        """Return the functions whose results are assigned to a name or an attribute; an empty text for other values."""
        found = []
        for node in ast.walk(self.tree):
            targets = node.targets if isinstance(node, ast.Assign) else ()
            if any(ast.unparse(target) == name for target in targets) and isinstance(node, ast.Assign):
                found.append(ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else "")
        return found

    def words(self, node: ast.AST) -> str:
        """Return the source text of a node."""
        return self._data[slice(*self._span(node))].decode("utf-8")

    # --- changing -----------------------------------------------------------------------------------------------------

    def insert(self, line: str, *, before: ast.stmt | None = None, after: ast.stmt | None = None) -> None:
        """Add a line before or after a statement, with its indentation."""
        beside = before or after
        assert beside is not None
        start, end = self._lines(beside)
        data = self._indent(beside) + line.encode() + self._newline
        place = start if before is not None else end
        if place and not self._data[:place].endswith(b"\n"):
            data = self._newline + data
        self._edits.append((place, place, data))

    def delete(self, statement: ast.stmt) -> None:
        """Delete a statement; raise CannotError if it is the only one of its block."""
        parent = self._parents[statement]
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and statement in block and len(block) == 1:
                raise CannotError(f"line {statement.lineno} stands alone in its block")
        self._edits.append((*self._lines(statement), b""))

    def replace(self, node: ast.AST, text: str) -> None:
        """Replace the source text of an expression."""
        self._edits.append((*self._span(node), text.encode()))

    def add_keyword(self, call: ast.Call, text: str) -> None:
        """Append an argument to a call."""
        end = max((self._span(node)[1] for node in (*call.args, *call.keywords)), default=0)
        place = end or self._span(call)[1] - 1
        self._edits.append((place, place, (f", {text}" if end else text).encode()))

    def remove_keyword(self, call: ast.Call, name: str) -> None:
        """Remove a keyword argument from a call."""
        found = next(keyword for keyword in call.keywords if keyword.arg == name)
        given = sorted([*call.args, *call.keywords], key=lambda node: self._span(node)[0])
        at = given.index(found)
        start, end = self._span(found)
        if at > 0:
            start = self._span(given[at - 1])[1]
        elif len(given) > 1:
            end = self._span(given[1])[0]
        self._edits.append((start, end, b""))

    def diff(self, name: str) -> str:
        """Return the changes as a unified diff.

        Raises:
            CannotError: there are none, or the file would be no Python any more.
        """
        before, after = (_AFTER_END.split(text) for text in (self.text, self.changed()))
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def changed(self) -> str:
        """Return the text with all edits; raises as `diff` does."""
        data = self._data
        for start, end, new in sorted(self._edits, reverse=True):
            data = data[:start] + new + data[end:]
        text = data.decode("utf-8")
        try:
            same = ast.dump(ast.parse(text)) == ast.dump(self.tree)
        except SyntaxError:
            raise CannotError("the changed file would be no Python") from None
        if same:
            raise CannotError("there is nothing to change")
        return text

    def _span(self, node: ast.AST) -> tuple[int, int]:
        at: Any = node
        return self._starts[at.lineno - 1] + at.col_offset, self._starts[at.end_lineno - 1] + at.end_col_offset

    def _lines(self, statement: ast.stmt) -> tuple[int, int]:
        """Return where the lines of a statement begin and end; raise CannotError where others share them."""
        start, end = self._span(statement)
        first, last = self._starts[statement.lineno - 1], self._starts[statement.end_lineno or 0]
        rest = self._data[end:last].strip()
        if self._data[first:start].strip() or (rest and not rest.startswith(b"#")):
            raise CannotError(f"line {statement.lineno} holds more than one statement")
        return first, last

    def _indent(self, statement: ast.stmt) -> bytes:
        start, _ = self._span(statement)
        return self._data[self._starts[statement.lineno - 1] : start]
