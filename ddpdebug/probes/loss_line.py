"""Finds the source line that made the loss: the last assignment to the loss's name before the backward call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

from ddpdebug import source_lines
from ddpdebug.isolation.user_code import is_users, location

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_MAX_LINES = 20_000


def expression(frame: FrameType | None) -> str | None:
    """Return `file:line` of the expression that made the loss; None if the frame's source does not show it."""
    if frame is None:
        return None
    file = frame.f_code.co_filename
    lines = source_lines.getlines(file)
    if not lines or len(lines) > _MAX_LINES:
        return None
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError) as error:
        if is_users(error):
            raise
        return None
    found = line_of_loss(tree, frame.f_lineno)
    return None if found is None else location(file, found)


def line_of_loss(tree: ast.AST, line: int) -> int | None:
    """Return the line of the last assignment to a name in the backward call at `line`, or of the call itself."""
    call = backward_call(tree, line)
    if call is None:
        return None
    if is_computed_in(call):
        return call.lineno
    made = assignment(tree, call)
    return None if made is None else made.lineno


def backward_call(tree: ast.AST, line: int) -> ast.Call | None:
    """Return the backward call that spans a line."""
    calls = [n for n in _own(scope_at(tree, line)) if isinstance(n, ast.Call) and n.lineno <= line <= _end(n)]
    return next(iter([call for call in calls if _is_backward(call)]), None)


def is_computed_in(call: ast.Call) -> bool:
    """Return whether a backward call computes the loss in its own expression."""
    return any([isinstance(n, ast.Call) and n is not call and not _is_scaling(n) for n in ast.walk(call)])


def assignment(tree: ast.AST, call: ast.Call) -> ast.stmt | None:
    """Return the last assignment to a name in a backward call before it, without those that only rescale."""
    names = names_in(call)
    assigned = sorted(
        (n for n in _own(scope_at(tree, call.lineno)) if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign)),
        key=lambda node: node.lineno,
    )
    best: ast.stmt | None = None
    for node in assigned:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        told = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        if node.lineno < call.lineno and told & names and not (best is not None and _is_rescaling(node, told)):
            best = node
    return best


def names_in(call: ast.Call) -> set[str]:
    """Return the names in a backward call: the loss is among them."""
    return {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}


def scope_at(tree: ast.AST, line: int) -> ast.AST:
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
    """Return whether a call only passes the loss on: `scaler.scale(loss)`, `loss.mean()`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in {"scale", "mean", "sum", "backward", "float"}


def _is_rescaling(node: ast.Assign | ast.AugAssign | ast.AnnAssign, told: set[str]) -> bool:
    """Return whether an assignment only rescales what it assigns to: `loss = loss / len(parts)`, `loss /= 4`."""
    factor: ast.expr | None
    if isinstance(node, ast.AugAssign):
        operator, factor = node.op, node.value
    elif isinstance(node.value, ast.BinOp) and isinstance(node.value.left, ast.Name) and node.value.left.id in told:
        operator, factor = node.value.op, node.value.right
    else:
        return False
    calls = [call for call in ast.walk(factor) if isinstance(call, ast.Call)]
    plain = all([isinstance(call.func, ast.Name) and call.func.id in {"len", "float", "int"} for call in calls])
    return isinstance(operator, ast.Div | ast.Mult) and plain
