"""The source line behind an autograd node of the loss, found by reading the source; runs no user code.

What ran between the model's call and backward is written down there: its operations in the order of their evaluation,
those of the functions that it calls in their place. The graph has its nodes in the same order. Laid side by side, most
nodes fit one line only; where several fit equally well, all of them are named and none is chosen.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from ddpdebug.forensics.loss.loss_graph import kind_of
from ddpdebug.forensics.loss.source_reading import Reader, Written, function_tree
from ddpdebug.isolation.local_variables import local_values
from ddpdebug.isolation.user_code import location, user_frame
from ddpdebug.probes.loss_line import assignment, backward_call, names_in, scope_at

_MAX_NODES = 400
_MAX_CANDIDATES = 4
_MAX_FRAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The source line of an operation of the loss, or several candidates."""

    lines: tuple[str, ...]
    function: str  # that holds the first of them
    sure: bool  # most of the graph was found in the source

    def fields(self) -> dict[str, Any]:
        """Return the fields of a detail about the place; `location` only without doubt."""
        if len(self.lines) > 1 or not self.sure:
            return {"location": None, "candidates": self.lines[:_MAX_CANDIDATES]}
        how = f"in the source of {self.function}, by matching its operations with the loss's graph"
        return {"location": self.lines[0], "line_found": how}


def place_of(
    frame: FrameType | None,
    kinds: Sequence[str],
    bad: int,
    models: Collection[object],
    called_at: tuple[str, int] | None,
    caller: tuple[CodeType, Mapping[str, Any]] | None = None,
) -> Place | None:
    """Return the source line of the operation behind a node of the loss's graph; None if the source does not show it.

    Args:
        frame: which calls backward.
        kinds: of the nodes, in the order in which they were made (`LogBackward0`).
        bad: the position of the node.
        models: objects whose call begins the loss expression: the model, and its wrapper.
        called_at: file and line of the model's call.
        caller: the function around that line, and its globals: it may have returned, to a trainer that calls backward.
    """
    start = max(0, bad - _MAX_NODES)
    window = [kind_of(name).lower() for name in kinds[start : bad + _MAX_NODES]]
    written = _returned(frame, models, called_at, caller) or _written(frame, models, called_at)
    fitting, matched = best_fits([entry.kinds for entry in written], window, bad - start)
    lines = list(dict.fromkeys(location(*written[i].place) for i in fitting))
    if not lines:
        return None
    return Place(lines=tuple(lines), function=written[fitting[0]].function, sure=2 * matched >= len(window))


def best_fits(written: Sequence[Collection[str]], nodes: Sequence[str], bad: int) -> tuple[list[int], int]:
    """Return the positions in `written` that can be node `bad` when as many nodes as possible match in order.

    Also returns how many fit. With few, the operation may stand in code that could not be read.
    """
    before = _common(written, nodes[:bad])
    after = _common(list(reversed(written)), list(reversed(nodes[bad + 1 :])))
    scores = {i: before[i] + after[len(written) - 1 - i] for i, kinds in enumerate(written) if nodes[bad] in kinds}
    best = max(scores.values(), default=-1)
    return [i for i, score in scores.items() if score == best], best + 1


def _common(written: Sequence[Collection[str]], nodes: Sequence[str]) -> list[int]:
    """Return for every i the length of the longest common subsequence of `written[:i]` and all nodes."""
    row = [0] * (len(written) + 1)
    for node in nodes:
        diagonal = 0
        for i, kinds in enumerate(written, 1):
            diagonal, row[i] = row[i], diagonal + 1 if node in kinds else max(row[i], row[i - 1])
    return row


def _written(frame: FrameType | None, models: Collection[object], called_at: tuple[str, int] | None) -> list[Written]:
    """Return the operations from the model's call to backward, in the order of their evaluation."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return []
        tree = function_tree(frame.f_code)
        if tree is None:
            return []
        last = frame.f_lineno
        scope = scope_at(tree, last)
        call = backward_call(tree, last)
        handed_in = call is not None and assignment(tree, call) is None and names_in(call) & _arguments(frame)
        if handed_in and frame.f_back is not None:
            frame = user_frame(frame.f_back)
            continue
        first = _loop_start(scope, last)
        if called_at is not None and called_at[0] == frame.f_code.co_filename and first <= called_at[1] <= last:
            first = called_at[1] if scope_at(tree, called_at[1]) is scope else first
        reader = Reader(models, call)
        reader.frame(frame.f_code, frame.f_globals, local_values(frame), scope, (first, last))
        return reader.found
    return []


def _returned(
    frame: FrameType | None,
    models: Collection[object],
    called_at: tuple[str, int] | None,
    caller: tuple[CodeType, Mapping[str, Any]] | None,
) -> list[Written]:
    """Return the operations of the function that has called the model, from there to its end.

    Nothing where it still runs, or where the user's own code calls backward.
    """
    if frame is None or caller is None or called_at is None:
        return []
    own = function_tree(frame.f_code)
    if own is None or backward_call(own, frame.f_lineno) is not None:
        return []
    above: FrameType | None = frame
    while above is not None:
        if above.f_code is caller[0]:
            return []
        above = above.f_back
    tree = function_tree(caller[0])
    if tree is None:
        return []
    code, names = caller
    scope = scope_at(tree, called_at[1])
    reader = Reader(models)
    reader.frame(code, names, {}, scope, (called_at[1], getattr(scope, "end_lineno", None) or called_at[1]))
    return reader.found


def _loop_start(scope: ast.AST, line: int) -> int:
    """Return the line on which the innermost loop around a line begins, 0 without a loop."""
    loops = [node for node in ast.walk(scope) if isinstance(node, ast.For | ast.AsyncFor | ast.While)]
    return max((loop.lineno for loop in loops if loop.lineno <= line <= (loop.end_lineno or line)), default=0)


def _arguments(frame: FrameType) -> set[str]:
    code = frame.f_code
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
