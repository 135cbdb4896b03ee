"""Finds the calls of dropout, or of hand-written dropout, in a module's source, and whether they are active.

By hand is noise of a fixed size that is added to something, and a mask of a fixed rate that something is multiplied by.
Noise that is computed with otherwise is the model's: a variational one learns its size, one of denoising uses it again.

Nothing runs: the source is read as `source_reading.py` does, values are looked up in the module's own tables. Names of
local variables are followed only as far as they hold such noise; branches that the mode does not take are left out.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

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
#: Functions that draw a tensor, and methods that fill one.
_NOISE = {"randn", "randn_like", "rand", "rand_like"}
_UNIFORM = {"rand", "rand_like", "uniform_"}
_FILLS = {"normal_", "uniform_", "bernoulli_"}
#: What a tensor of noise goes through and stays one.
_KEEPS = {"to", "type_as", "float", "half", "double", "bfloat16", "cuda", "cpu", "clone", "detach", "view", "reshape"}
_KEEPS |= {"unsqueeze", "expand", "expand_as", "floor", "floor_", "bool", "contiguous"}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_SUMS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_UNKNOWN = object()


class _Drawn(NamedTuple):
    """What a local name or an expression holds: numbers that were drawn, times nothing but constants."""

    function: str
    mask: bool = False  # of zeros and ones
    name: str | None = None


def dropout_calls(module: torch.nn.Module) -> tuple[Sequence[DropoutCall], bool]:
    """Return the dropout calls of a module that may be active, and whether its code draws random numbers otherwise."""
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
        self._scopes: list[ast.AST] = []
        self._unsure = 0  # branches around, of which only running the code would tell whether they are taken

    # --- branches -----------------------------------------------------------------------------------------------------

    def _inline(self, tree: ast.AST, context: Context) -> None:
        self._scopes.append(tree)
        super()._inline(tree, context)
        self._scopes.pop()

    def _statements(self, body: Sequence[ast.AST], context: Context, lines: tuple[int, int] | None) -> None:
        for at, node in enumerate(body):
            if not isinstance(node, ast.If):
                super()._statements([node], context, lines)
                continue
            self._visit(node.test, context)
            which = self._truth(node.test, context)
            if which is not _UNKNOWN:
                taken = node.body if which else node.orelse
                self._statements(taken, context, lines)
                if taken and isinstance(taken[-1], ast.Return):
                    return
                continue
            self._unsure += 1
            for part in (node.body, node.orelse):
                self._statements(part, context, lines)
            self._unsure -= 1
            if isinstance(node.body[-1], ast.Return):  # what follows may not run
                self._unsure += 1
                self._statements(body[at + 1 :], context, lines)
                self._unsure -= 1
                return

    def _truth(self, node: ast.expr, context: Context) -> Any:
        """Return whether a condition holds, `_UNKNOWN` where only running the code would tell."""
        match node:
            case ast.BoolOp(op=op, values=values):
                known = [self._truth(value, context) for value in values]
                decides = isinstance(op, ast.Or)
                if any(value is decides for value in known):
                    return decides
                return _UNKNOWN if any(value is _UNKNOWN for value in known) else not decides
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._truth(operand, context)
                return _UNKNOWN if inner is _UNKNOWN else not inner
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                one, other = self._constant(left, context), self._constant(right, context)
                compare = _COMPARISONS.get(type(op))
                return _UNKNOWN if compare is None or _UNKNOWN in (one, other) else compare(one, other)
        value = self._constant(node, context)
        return _UNKNOWN if value is _UNKNOWN else bool(value)

    # --- dropout by hand ----------------------------------------------------------------------------------------------

    def _visit(self, node: ast.AST, context: Context) -> None:
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._visit(test, context)
                which = self._truth(test, context)
                for taken in (body, orelse) if which is _UNKNOWN else (body if which else orelse,):
                    self._unsure += which is _UNKNOWN
                    self._visit(taken, context)
                    self._unsure -= which is _UNKNOWN
                return
            case ast.BinOp(op=op, left=left, right=right):
                self._combined(op, left, right, context)
            case ast.AugAssign(op=op, target=ast.Name() as target, value=value):
                self._combined(op, target, value, context)
            case (
                ast.Call(func=ast.Attribute(value=value, attr="add" | "add_" as method), args=[other])
                | ast.Call(func=ast.Attribute(value=value, attr="mul" | "mul_" as method), args=[other])
            ):
                op = ast.Add() if method.startswith("add") else ast.Mult()
                self._combined(op, value, other, context)
        held: Any = None
        if isinstance(node, ast.Assign):
            held = self._drawn(node.value, context) or self._constant(node.value, context)
        super()._visit(node, context)
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if held is not _UNKNOWN:
                context.names[name] = held._replace(name=name) if isinstance(held, _Drawn) else held

    def _combined(self, op: ast.operator, left: ast.expr, right: ast.expr, context: Context) -> None:
        """Note what is added to, or multiplied by, something that was not drawn."""
        one, other = self._drawn(left, context), self._drawn(right, context)
        if (one is None) == (other is None):
            return
        drawn, rest = (one, right) if one is not None else (other, left)
        assert drawn is not None
        # uniform noise that is added makes numbers of a grid continuous, on purpose
        adds = isinstance(op, ast.Add | ast.Sub) and drawn.function not in _UNIFORM
        wanted = isinstance(op, ast.Mult) if drawn.mask else adds
        if not wanted or self._constant(rest, context) is not _UNKNOWN or self._uses(drawn.name) > 1:
            return
        file, line = context.at or (context.file, left.lineno)
        active = None if self._unsure else True
        call = DropoutCall(function=drawn.function, location=location(file, line), active=active)
        self.dropouts.append(call)

    def _uses(self, name: str | None) -> int:
        """Return how often a local name is read, other than to make itself anew: noise that is used again is wanted."""
        if name is None:
            return 0
        own = {
            id(inner)
            for node in ast.walk(self._scopes[-1])
            if (isinstance(node, ast.Assign) and any(getattr(target, "id", None) == name for target in node.targets))
            or isinstance(node, ast.Expr)
            for inner in ast.walk(node)
        }
        return sum(
            isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and id(node) not in own
            for node in ast.walk(self._scopes[-1])
        )

    def _drawn(self, node: ast.expr, context: Context) -> _Drawn | None:
        """Return what an expression holds if that was drawn, and changed by constants only."""
        match node:
            case ast.Name(id=name):
                known = context.names.get(name)
                return known if isinstance(known, _Drawn) else None
            case ast.Compare(left=left, ops=[_], comparators=[right]):
                for side, limit in ((left, right), (right, left)):
                    if (drawn := self._drawn(side, context)) and self._constant(limit, context) is not _UNKNOWN:
                        return drawn._replace(mask=True)
            case ast.BinOp(op=op, left=left, right=right):
                for side, factor in ((left, right), (right, left)):
                    drawn = self._drawn(side, context)
                    if drawn is not None and (value := self._constant(factor, context)) is not _UNKNOWN:
                        return drawn if value or not isinstance(op, ast.Mult) else None
            case ast.Call(keywords=keywords) if all(word.arg != "generator" for word in keywords):
                return self._made(node, context)
        return None

    def _made(self, node: ast.Call, context: Context) -> _Drawn | None:
        """Return what a call draws, or makes of what was drawn."""
        values = [*node.args, *(word.value for word in node.keywords)]
        match node.func:
            case ast.Attribute(value=value, attr=name) if name in _KEEPS:
                drawn = self._drawn(value, context)
                return drawn and drawn._replace(mask=drawn.mask or name.startswith(("floor", "bool")))
            case ast.Attribute(attr=name) if name in _FILLS:
                fixed = all(self._constant(value, context) is not _UNKNOWN for value in values)
                return _Drawn(name, mask=name == "bernoulli_") if fixed else None
        target = self._resolve(node.func, context)
        if target is torch.normal:
            fixed = all(self._constant(value, context) is not _UNKNOWN for value in values[:2])
            return _Drawn("normal") if fixed else None
        if target is torch.bernoulli:
            return _Drawn("bernoulli", mask=True) if self._is_filled(values[0], context) else None
        return next((_Drawn(name) for name in sorted(_NOISE) if target is getattr(torch, name)), None)

    def _is_filled(self, node: ast.expr, context: Context) -> bool:
        """Whether an expression is a tensor of one constant."""
        match node:
            case ast.Call(func=function, args=[_, value]):
                target = self._resolve(function, context)
                filled = target is torch.full or target is torch.full_like  # it may be anything: not to be compared
                return filled and self._constant(value, context) is not _UNKNOWN
            case ast.BinOp(op=ast.Mult(), left=left, right=right):
                return any(
                    self._constant(factor, context) is not _UNKNOWN
                    and isinstance(side, ast.Call)
                    and any(self._resolve(side.func, context) is ones for ones in (torch.ones, torch.ones_like))
                    for side, factor in ((left, right), (right, left))
                )
        return False

    def _constant(self, node: ast.expr, context: Context) -> Any:
        """Return a number or truth value, of local names and sums too, `_UNKNOWN` where there is none."""
        match node:
            case ast.Name(id=name):
                value = context.names.get(name, context.outer.get(name, _UNKNOWN))
                return value if type(value) in {bool, int, float} else _UNKNOWN
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._constant(operand, context)
                return _UNKNOWN if inner is _UNKNOWN else -inner
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _SUMS:
                one, other = self._constant(left, context), self._constant(right, context)
                return _UNKNOWN if _UNKNOWN in (one, other) else _SUMS[type(op)](one, other)
        return self._value(node, context)

    # --- calls --------------------------------------------------------------------------------------------------------

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

    def _resolve(self, node: ast.AST, context: Context) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in {bool, int, float}:  # an argument of a function
            return node.value
        return super()._resolve(node, context)

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
            active=None if active is _UNKNOWN or self._unsure else True,
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
