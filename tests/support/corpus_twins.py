"""Scripts of the corpus as they are with their fault or without, with no switch for it in them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

_CORPUS = Path(__file__).parent.parent / "corpus"


class _Decided(ast.NodeTransformer):
    """Leaves of a script what it is with or without its fault."""

    def __init__(self, *, fault: bool) -> None:
        self._fault = fault

    def _choice(self, node: ast.AST, one: Any, other: Any) -> Any:
        negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        name = node.operand if isinstance(node, ast.UnaryOp) else node
        if not (isinstance(name, ast.Name) and name.id == "FAULT"):
            return None
        return one if self._fault is not negated else other

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        chosen = self._choice(node.test, node.body, node.orelse)
        return node if chosen is None else chosen

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        chosen = self._choice(node.test, node.body, node.orelse)
        return node if chosen is None else chosen


def twin(name: str, *, fault: bool) -> str:
    """Return a script of the corpus as it is with its fault, or without."""
    tree = ast.parse((_CORPUS / f"{name}.py").read_text(encoding="utf-8"))
    return ast.unparse(ast.fix_missing_locations(_Decided(fault=fault).visit(tree))) + "\n"
