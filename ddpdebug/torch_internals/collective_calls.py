"""Callbacks in the communicating functions of `torch.distributed`, called as the functions are.

Scripts import them by name, before ddpdebug is attached too, and torch calls some from others: so their code is
exchanged (`function_code.py`), not their name. What torch puts around them (`_exception_logger`) stays as it is, and so
does what a script has put around them or in their place. The look comes first in a function, and it is told of as it
ends in whatever way; while something is compiled both are left out.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch.distributed as dist

from ddpdebug.torch_internals import names
from ddpdebug.torch_internals.function_code import Called, all_of, call_of, weave

#: Function -> what it is given: tensors (or ranks), the rank that it names, and the same as the group numbers it.
CALLS: dict[str, tuple[str, str, str]] = {
    "all_gather": ("tensor", "", ""),
    "all_gather_coalesced": ("input_tensor_list", "", ""),
    "all_gather_into_tensor": ("input_tensor", "", ""),
    "all_gather_object": ("", "", ""),
    "all_gather_single": ("input_tensor", "", ""),
    "all_reduce": ("tensor", "", ""),
    "all_reduce_coalesced": ("tensors", "", ""),
    "all_to_all": ("input_tensor_list", "", ""),
    "all_to_all_single": ("input", "", ""),
    "barrier": ("", "", ""),
    "batch_isend_irecv": ("", "", ""),
    "broadcast": ("tensor", "src", "group_src"),
    "broadcast_object_list": ("", "src", "group_src"),
    "destroy_process_group": ("", "", ""),
    "gather": ("tensor", "dst", "group_dst"),
    "gather_object": ("", "dst", "group_dst"),
    "irecv": ("tensor", "src", "group_src"),
    "isend": ("tensor", "dst", "group_dst"),
    "monitored_barrier": ("", "", ""),
    "new_group": ("ranks", "", ""),
    "recv": ("tensor", "src", "group_src"),
    "recv_object_list": ("", "src", "group_src"),
    "reduce": ("tensor", "dst", "group_dst"),
    "reduce_scatter": ("input_list", "", ""),
    "reduce_scatter_single": ("input", "", ""),
    "reduce_scatter_tensor": ("input", "", ""),
    "scatter": ("tensor", "src", "group_src"),
    "scatter_object_list": ("", "src", "group_src"),
    "send": ("tensor", "dst", "group_dst"),
    "send_object_list": ("", "dst", "group_dst"),
}
_PLACEHOLDER = "ddpdebug: the note of a collective"
_BEGINS, _ENDS = "ddpdebug: a collective begins", "ddpdebug: a collective ends"

#: Takes the name of the function, its tensors, the rank that it names, the same in the group's numbers, and the group.
Look = Callable[[str, Any, Any, Any, Any], None]


def look_at_collectives(look: Look, begins: Callable[[], None], ends: Callable[[], None]) -> Callable[[], None]:
    """Have `look` called in each call of these functions before it communicates; return the function that undoes it.

    Args:
        begins: called after the look.
        ends: called as the function returns or raises.
    """
    looks = {name: Called(call) for name, call in ((_PLACEHOLDER, look), (_BEGINS, begins), (_ENDS, ends))}
    home = dist.distributed_c10d
    undo: list[Callable[[], None] | None] = []
    for name, given in CALLS.items():
        function = inspect.unwrap(getattr(home, name, None))  # type: ignore[arg-type]  # None is returned as it is
        if not isinstance(function, FunctionType) or function.__globals__ is not vars(home):
            continue  # the user has replaced it in torch's own module, or this torch has none
        undo.append(_with_note(function, name, given, looks))
    return all_of(undo)


def _with_note(
    function: FunctionType, name: str, given: tuple[str, str, str], looks: Mapping[str, Called]
) -> Callable[[], None] | None:
    original = function.__code__
    arguments = original.co_varnames[: original.co_argcount + original.co_kwonlyargcount]

    def change(_: ast.Module, definition: ast.FunctionDef) -> None:
        values: list[ast.expr] = [ast.Constant(name)]
        values += [
            ast.Name(wanted, ast.Load()) if wanted in arguments else ast.Constant(None) for wanted in (*given, "group")
        ]
        said = 0 if ast.get_docstring(definition) is None else 1
        rest = definition.body[said:]
        first = next(iter([one for one in rest if not isinstance(one, ast.Global)]))
        note = _unless_compiled(call_of(_PLACEHOLDER, values), first)
        begins, ends = (_unless_compiled(call_of(name, []), first) for name in (_BEGINS, _ENDS))
        whole = ast.copy_location(ast.Try(body=rest, handlers=[], orelse=[], finalbody=[ends]), first)
        definition.body[said:] = [note, begins, whole]

    return weave(function, change, looks, _PLACEHOLDER)


def _unless_compiled(call: ast.Call, first: ast.stmt) -> ast.Expr:
    """Return a statement with a call, in the line in which another one begins."""
    unseen = ast.parse("torch.compiler.is_compiling()", mode="eval").body
    made = ast.Expr(ast.BoolOp(op=ast.Or(), values=[unseen, call]))
    for new in ast.walk(made):
        ast.copy_location(new, first)
        if isinstance(new, ast.expr | ast.stmt):  # of a statement of many lines the first
            new.end_lineno, new.end_col_offset = new.lineno, new.col_offset
    return made


def own_group(group: Any) -> Any:
    """Return the process group of a call, the default one for None; None if this rank is not in it."""
    if group is None:
        return dist.group.WORLD
    return group if isinstance(group, dist.ProcessGroup) else None


def sequence_number(group: Any) -> int | None:
    """Return a group's count of collectives, None if it has none; on gloo it includes point-to-point messages."""
    try:
        count: int = getattr(group, names.SEQUENCE_NUMBER)()
    except (AttributeError, RuntimeError):  # a group of the user's, which has no backend that counts
        return None
    return count


def name_of(group: Any) -> str:
    """Return the name of a group, the same on all ranks; empty if it has none."""
    try:
        return str(group.group_name)
    except (RuntimeError, AttributeError):
        return ""


def counts_messages(group: Any) -> bool:
    """Whether a group counts point-to-point messages among its collectives."""
    try:
        return "gloo" in str(dist.get_backend(group))
    except (KeyError, RuntimeError, ValueError):  # a group that torch does not know
        return False
