"""Reads which calls of dropout functions a module's own code makes, and whether they are switched on.

Nothing runs: the source is read as `source_reading.py` does, values are looked up in the module's own tables. Names of
local variables are not followed, so what they hold is not known.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn import functional

from ddpdebug.forensics.loss.source_reading import Context, Reader
from ddpdebug.isolation.user_code import location
from ddpdebug.schema.announcements import DropoutCall

_FUNCTIONS = {
    "dropout": True,  # what `training` is where a call does not say
    "dropout1d": True,
    "dropout2d": True,
    "dropout3d": True,
    "alpha_dropout": False,
    "feature_alpha_dropout": False,
}
_ATTENTION = "scaled_dot_product_attention"
_DROPOUT_P = 4  # its position among the arguments of attention
_P, _TRAINING = 1, 2  # those of a dropout function
#: Calls that draw random numbers, by their names.
_RANDOM = re.compile(r"rand|normal|bernoulli|multinomial|sample|exponential|poisson|gumbel|uniform|geometric|dropout")
_UNKNOWN = object()


def dropout_calls(module: torch.nn.Module) -> tuple[Sequence[DropoutCall], bool]:
    """Return the dropout calls of a module that are not certainly off, and whether its code draws in other ways too."""
    forward = inspect.getattr_static(type(module), "forward", None)
    forward = inspect.unwrap(forward) if isinstance(forward, FunctionType) else None
    if not isinstance(forward, FunctionType):
        return (), False
    reader = _DropoutReader()
    reader.method(forward, module)
    return reader.dropouts, reader.draws_otherwise


class _DropoutReader(Reader):
    """Collects dropout calls instead of operations."""

    def __init__(self) -> None:
        super().__init__(())
        self.dropouts: list[DropoutCall] = []
        self.draws_otherwise = False

    def _call(self, node: ast.Call, context: Context) -> None:
        target = self._resolve(node.func, context)
        name = _known(target)
        if name is None and not issubclass(type(target), torch.nn.Module):
            if not isinstance(target, FunctionType | MethodType | ast.FunctionDef):
                self._note_name(node)
            super()._call(node, context)
            return
        for child in ast.iter_child_nodes(node):
            self._visit(child, context)
        if name is not None:
            self._note(name, node, context)

    def _read(self, function: FunctionType, owner: object, node: ast.Call, context: Context) -> bool:
        read = super()._read(function, owner, node, context)
        if not read:
            self._note_name(node)
        return read

    def _note_name(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        self.draws_otherwise |= bool(_RANDOM.search(called))

    def _note(self, name: str, node: ast.Call, context: Context) -> None:
        if name == _ATTENTION:
            share = self._argument(node, "dropout_p", _DROPOUT_P, 0.0, context)
            active = share
        else:
            share = self._argument(node, "p", _P, 0.5, context)
            active = self._argument(node, "training", _TRAINING, _FUNCTIONS[name], context)
        known = isinstance(share, int | float)
        if (known and not share) or (active is not _UNKNOWN and not active):
            return
        file, line = context.at or (context.file, node.lineno)
        call = DropoutCall(
            function=name,
            p=float(share) if known else None,
            location=location(file, line),
            active=None if active is _UNKNOWN else True,
        )
        self.dropouts.append(call)

    def _argument(self, node: ast.Call, name: str, position: int, default: object, context: Context) -> Any:
        for keyword in node.keywords:
            if keyword.arg == name:
                return self._value(keyword.value, context)
        if any(isinstance(argument, ast.Starred) for argument in node.args[: position + 1]):
            return _UNKNOWN
        if len(node.args) > position:
            return self._value(node.args[position], context)
        return _UNKNOWN if any(keyword.arg is None for keyword in node.keywords) else default

    def _value(self, node: ast.expr, context: Context) -> Any:
        """Return a number or truth value, `_UNKNOWN` where only running the code would tell."""
        value: Any = _UNKNOWN
        match node:
            case ast.Constant(value=constant):
                value = constant
            case ast.Attribute():
                value = self._resolve(node, context)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._value(operand, context)
                value = _UNKNOWN if inner is _UNKNOWN else not inner
            case ast.IfExp(test=test, body=body, orelse=orelse):
                which = self._value(test, context)
                value = _UNKNOWN if which is _UNKNOWN else self._value(body if which else orelse, context)
        return value if type(value) in {bool, int, float} else _UNKNOWN


def _known(target: object) -> str | None:
    """Return the name of the dropout function that something is, whatever it is called where it is used."""
    if target is functional.scaled_dot_product_attention:
        return _ATTENTION
    return next((name for name in _FUNCTIONS if target is getattr(functional, name)), None)
