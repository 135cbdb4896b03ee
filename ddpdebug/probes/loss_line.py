"""Finds the line that made the loss: the last assignment, before the backward, to what backward was called on."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import FrameType

from ddpdebug.probes.guard import location

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_MAX_LINES = 20_000


def expression(frame: FrameType | None) -> str | None:
    """Return `file:line` of the expression that the loss comes from, as far as the source of the frame shows it."""
    if frame is None:
        return None
    file = frame.f_code.co_filename
    lines = linecache.getlines(file)
    if not lines or len(lines) > _MAX_LINES:
        return None
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None
    found = line_of_loss(tree, frame.f_lineno)
    return None if found is None else location(file, found)


def line_of_loss(tree: ast.AST, line: int) -> int | None:
    """Return the line of the last assignment to a name in the backward call at `line`, or of that call itself."""
    scope = _scope(tree, line)
    calls = [node for node in _own(scope) if isinstance(node, ast.Call) and node.lineno <= line <= _end(node)]
    calls = [call for call in calls if _is_backward(call)]
    if not calls:
        return None
    call = calls[0]
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    inside = [node for node in ast.walk(call) if isinstance(node, ast.Call) and node is not call]
    if any(not _is_scaling(node) for node in inside):
        return call.lineno  # the loss is computed right there
    assigned = sorted(
        (node for node in _own(scope) if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)),
        key=lambda node: node.lineno,
    )
    best: int | None = None
    for node in assigned:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        told = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        if node.lineno < call.lineno and told & names and not (best is not None and _is_rescaling(node, told)):
            best = node.lineno
    return best


def _scope(tree: ast.AST, line: int) -> ast.AST:
    """Return the innermost function around a line, or the module."""
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = [n for n in inside if n.lineno <= line <= _end(n)]
    return max(inside, key=lambda n: n.lineno, default=tree)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Walk a scope without the functions defined in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _Function):
            yield child
            yield from _own(child)


def _end(node: ast.AST) -> int:
    return int(getattr(node, "end_lineno", None) or node.lineno)  # type: ignore[attr-defined]


def _is_backward(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in {"backward", "manual_backward"}


def _is_scaling(call: ast.Call) -> bool:
    """Tell whether a call only passes the loss on: `scaler.scale(loss)`, `loss.mean()`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in {"scale", "mean", "sum", "backward", "float"}


def _is_rescaling(node: ast.Assign | ast.AugAssign | ast.AnnAssign, told: set[str]) -> bool:
    """Tell whether an assignment only rescales what it assigns to: `loss = loss / len(parts)`, `loss /= 4`."""
    factor: ast.expr | None
    if isinstance(node, ast.AugAssign):
        operator, factor = node.op, node.value
    elif isinstance(node.value, ast.BinOp) and isinstance(node.value.left, ast.Name) and node.value.left.id in told:
        operator, factor = node.value.op, node.value.right
    else:
        return False
    calls = [call for call in ast.walk(factor) if isinstance(call, ast.Call)]
    plain = all(isinstance(call.func, ast.Name) and call.func.id in {"len", "float", "int"} for call in calls)
    return isinstance(operator, ast.Div | ast.Mult) and plain
