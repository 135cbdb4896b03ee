"""Table of the autograd nodes that calls and operators in the source make: `x.log()` makes a `LogBackward0`.

Most nodes are called like the function that makes them. The table has the others.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch

#: Function -> the nodes that it makes one after the other, `a|b` where it depends.
_MADE: dict[str, str] = {
    "norm": "linalgvectornorm|norm",
    "vectornorm": "linalgvectornorm",
    "square": "pow",
    "sub": "sub|rsub",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "truedivide": "div",
    "clamp": "clamp|clampmin|clampmax",
    "clip": "clamp|clampmin|clampmax",
    "crossentropyloss": "logsoftmax nllloss|nllloss2d",
    "nlllossnd": "nllloss|nllloss2d",
    "l1loss": "sub abs mean|sum",
    "kldiv": "sub|xlogy mul sub mean|sum",
    "nanmean": "nansum div",
    "pairwisedistance": "sub norm",
    "cosinesimilarity": "linalgvectornorm div mul sum",
    "cdist": "cdist|euclideandist",
    "matmul": "mm|bmm|mv|dot|unsafeview",
    "reshape": "view|reshapealias|unsafeview",
    "flatten": "view|reshapealias|unsafeview",
    "float": "tocopy",
    "double": "tocopy",
    "half": "tocopy",
    "to": "tocopy",
    "type": "tocopy",
    "concat": "cat",
    "absolute": "abs",
    "erfcinv": "erfinv",
    "arccos": "acos",
    "arcsin": "asin",
    "arctanh": "atanh",
    "arccosh": "acosh",
    "specialxlogy": "xlogy",
    "specialexpit": "sigmoid",
    "sumtosize": "sum",
    "var": "var|varmean",
    "std": "std|stdmean",
}
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub|rsub",
    ast.Mult: "mul",
    ast.Div: "div|reciprocal",
    ast.Pow: "pow|exp2",
    ast.Mod: "remainder|fmod",
    ast.MatMult: "mm|bmm|mv|dot|unsafeview",
    ast.USub: "neg",
}
_INDEX = "index|select|slice|unsqueeze"

Kinds = Sequence[frozenset[str]]


def kinds_of_call(name: str, owner: Any) -> Kinds:
    """Return the kinds of the nodes that a call of a function or method makes, one set for each.

    Args:
        owner: what the method is called on, where that is known.
    """
    if name == "apply" and isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return _sets(owner.__name__.lower())
    plain = name.strip("_").replace("_", "").lower()
    return _sets(_MADE.get(plain, plain)) if plain else ()


def kinds_of_operator(node: ast.AST) -> Kinds:
    """Return the kinds of the nodes that an operator makes, nothing for what is none."""
    match node:
        case ast.BinOp(op=ast.Div(), left=ast.Constant()):
            return _sets("reciprocal mul")
        case ast.BinOp(op=operator) | ast.UnaryOp(op=operator) | ast.AugAssign(op=operator):
            return _sets(_OPERATORS.get(type(operator), ""))
        case ast.Subscript():
            return _sets(_INDEX)
    return ()


def _sets(text: str) -> Kinds:
    return [frozenset(part.split("|")) for part in text.split()]
