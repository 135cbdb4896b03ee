"""Reader of source code: lists the tensor operations in it, in the order of their evaluation. Runs nothing.

Names are looked up in the tables of frames, modules and instances; functions that are written in Python are read as if
they stood where they are called, those of installed packages under the line of the user's code that calls them. Most
autograd nodes are called like the function that makes them: `x.log()` makes a `LogBackward0`. A table has the others.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import tokenize
from collections.abc import Collection, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from ddpdebug import source_lines, torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.user_code import is_user_file, is_users

_MAX_DEPTH = 6
_MAX_FOUND = 1000
_MAX_READS = 200
_ROUNDS = 8  # of a loop
_MAX_LINES = 20_000
_MACHINERY = ("/torch/overrides.py", "/torch/_jit_internal.py")
_UNKNOWN = object()
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
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


class Written(NamedTuple):
    """An operation in the source."""

    kinds: frozenset[str]  # of the autograd nodes that it may make
    place: tuple[str, int]  # file and line
    function: str


class Context(NamedTuple):
    """The code that is being read, with the values of its names."""

    file: str
    function: str
    names: dict[str, Any]  # local ones; `_UNKNOWN` for those of which only the name is known
    outer: Mapping[str, Any]
    at: tuple[str, int] | None  # the line of the user's code that stands for all of this
    depth: int


def function_tree(code: CodeType) -> ast.AST | None:
    """Return the syntax tree of a function or module, with the line numbers of its file; None if it cannot be read."""
    lines = source_lines.getlines(code.co_filename)
    if not lines or len(lines) > _MAX_LINES:
        return None
    first = 1 if code.co_name == "<module>" else code.co_firstlineno
    try:
        block = lines if first == 1 else inspect.getblock(lines[first - 1 :])
        tree = ast.parse(textwrap.dedent("".join(block)))
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        if is_users(error):
            raise
        return None
    return ast.increment_lineno(tree, first - 1)


class Reader:
    """Reads one expression and the functions that it calls.

    Args:
        models: objects whose call makes everything before it forgotten.
        until: the call at which reading ends, once what it is called with has been read.
    """

    def __init__(self, models: Collection[object], until: ast.Call | None = None) -> None:
        self.found: list[Written] = []
        self._reads = 0
        self._until, self._is_over = until, False
        self._models = {id(model) for model in models}

    def frame(
        self,
        code: CodeType,
        outer: Mapping[str, Any],
        names: Mapping[str, Any],
        scope: ast.AST,
        lines: tuple[int, int],
    ) -> None:
        """Read the statements of a running function between two lines."""
        context = Context(code.co_filename, code.co_name, dict(names), outer, None, 0)
        self._statements(getattr(scope, "body", []), context, lines)

    def method(self, function: FunctionType, owner: object) -> None:
        """Read a method of an object; nothing is known of its other arguments."""
        code = function.__code__
        call = ast.Call(ast.Name("self", ast.Load(), lineno=code.co_firstlineno), [], [])
        self._read(function, owner, call, Context(code.co_filename, code.co_name, {}, {}, None, 0))

    # --- statements ---------------------------------------------------------------------------------------------------

    def _statements(self, body: Sequence[ast.AST], context: Context, lines: tuple[int, int] | None) -> None:
        for node in body:
            first, last = _span(node)
            if lines is not None and (last < lines[0] or first > lines[1]):
                continue
            parts = [part for name in ("body", "orelse", "finalbody") if (part := getattr(node, name, None))]
            if not parts or not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
                self._visit(node, context)
                continue
            for head in _heads(node):
                if lines is None or head.lineno >= lines[0]:  # type: ignore[attr-defined]  # an expression
                    self._visit(head, context)
            start, known = len(self.found), self.found
            for part in parts:
                self._statements(part, context, lines)
            whole = lines is None or last < lines[1]  # else it is the loop of the training
            if whole and isinstance(node, ast.For | ast.While) and self.found is known:
                more = self.found[start:] * (_ROUNDS - 1)
                self.found += more if 2 * len(more) < _MAX_FOUND else ()

    def _visit(self, node: ast.AST, context: Context) -> None:
        if self._is_over or len(self.found) >= _MAX_FOUND:
            return
        match node:
            case ast.Call():
                self._call(node, context)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                context.names[node.name] = node
            case ast.Lambda() | ast.ClassDef():
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._visit(value, context)
                known = self._resolve(value, context)
                if known is not _UNKNOWN or context.depth:  # a frame's own names are known as they are now
                    context.names[name] = known
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                for part in (*node.generators, node.elt):
                    self._visit(part, context)
            case _:
                for child in ast.iter_child_nodes(node):
                    self._visit(child, context)
                self._add(kinds_of_operator(node), node, context)

    def _add(self, kinds: Sequence[frozenset[str]], node: ast.AST, context: Context) -> None:
        place = context.at or (context.file, _line(node))
        self.found += [Written(some, place, context.function) for some in kinds]

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, context: Context) -> None:
        for child in ast.iter_child_nodes(node):
            self._visit(child, context)
        if node is self._until:
            self._is_over = True
            return
        target = self._resolve(node.func, context)
        if id(target) in self._models:
            self.found = []  # what came before belongs to the model's graph
            return
        if isinstance(target, ast.FunctionDef):
            values = self._arguments(node, context)
            inner = {**context.names, **dict.fromkeys(_parameters(target.args), _UNKNOWN)}
            inner |= dict(zip(_parameters(target.args), values, strict=False))
            self._inline(target, context._replace(names=inner, function=target.name, depth=context.depth + 1))
            return
        function, owner = _function(target)
        if issubclass(type(owner), torch.optim.Optimizer):
            return  # it is no part of a loss
        if function is None or not self._read(function, owner, node, context):
            self._add(kinds_of_call(_name(node.func), self._base(node.func, context)), node.func, context)

    def _read(self, function: FunctionType, owner: object, node: ast.Call, context: Context) -> bool:
        """Read a function in the place of its call; return False if that cannot be done."""
        code = function.__code__
        if context.depth >= _MAX_DEPTH or self._reads >= _MAX_READS or not _is_readable(code.co_filename):
            return False
        self._reads += 1
        tree = function_tree(code)
        found = [n for n in ast.walk(tree) if isinstance(n, _Scope)] if tree is not None else []
        if not found:
            return False
        names: dict[str, Any] = dict.fromkeys((*code.co_varnames, *code.co_cellvars), _UNKNOWN)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            names[name] = _content(cell)
        values = self._arguments(node, context)
        if owner is not _UNKNOWN:
            values.insert(0, owner)
        names |= dict(zip(code.co_varnames[: code.co_argcount], values, strict=False))
        names |= {k.arg: self._resolve(k.value, context) for k in node.keywords if k.arg in names}
        own = is_user_file(code.co_filename)
        at = context.at if context.at or own else (context.file, _line(node.func))
        inner = Context(code.co_filename, code.co_name, names, function.__globals__, at, context.depth + 1)
        self._inline(found[0], inner if own and not at else inner._replace(function=context.function))
        return True

    def _inline(self, tree: ast.AST, context: Context) -> None:
        if isinstance(tree, ast.Lambda):
            self._visit(tree.body, context)
        elif context.depth <= _MAX_DEPTH:
            self._statements(getattr(tree, "body", []), context, None)

    def _arguments(self, node: ast.Call, context: Context) -> list[Any]:
        values: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                break
            values.append(self._resolve(argument, context))
        return values

    # --- names --------------------------------------------------------------------------------------------------------

    def _base(self, node: ast.expr, context: Context) -> Any:
        """Return the object on which a method is called."""
        return self._resolve(node.value, context) if isinstance(node, ast.Attribute) else _UNKNOWN

    def _resolve(self, node: ast.AST, context: Context) -> Any:
        match node:
            case ast.Name(id=name):
                return context.names.get(name, context.outer.get(name, _UNKNOWN))
            case ast.Attribute(value=value, attr=name):
                return _attribute(self._resolve(value, context), name)
            case ast.Subscript(value=value, slice=ast.Constant(value=key)):
                return _item(self._resolve(value, context), key)
        return _UNKNOWN


def _is_readable(file: str) -> bool:
    """Whether functions of a file are the user's or those of a package, not machinery."""
    return is_user_file(file) or ("-packages/" in file and not file.endswith(_MACHINERY))


def _function(target: object) -> tuple[FunctionType | None, object]:
    """Return the Python function that a call of `target` runs, and what is its first argument."""
    kind = type(target)
    if is_a(target, FunctionType):
        wrapped = target.__dict__.get("__wrapped__")
        return _function(wrapped) if is_a(wrapped, FunctionType) else (target, _UNKNOWN)
    if is_a(target, MethodType):
        return _function(target.__func__)[0], target.__self__
    if is_a(target, staticmethod):
        return _function(target.__func__)
    if kind is functools.partial:
        return _function(target.func) if not target.args else (None, _UNKNOWN)  # type: ignore[attr-defined]
    if target is _UNKNOWN or is_a(target, type):
        return None, _UNKNOWN
    name = "forward" if issubclass(kind, torch.nn.Module) else "__call__"
    own = inspect.getattr_static(kind, name, None)
    return (own, target) if is_a(own, FunctionType) else (None, _UNKNOWN)


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute without running a property or `__getattr__`."""
    if owner is _UNKNOWN or is_a(owner, ast.AST):
        return _UNKNOWN
    if issubclass(type(owner), torch.nn.Module) and name in (modules := owner.__dict__.get(internals.MODULES, {})):
        return modules[name]
    found = inspect.getattr_static(owner, name, _UNKNOWN)
    if is_a(found, FunctionType) and not is_a(owner, type) and inspect.ismodule(owner) is False:
        in_own = name in getattr(owner, "__dict__", {})
        return found if in_own else MethodType(found, owner)
    if is_a(found, classmethod):
        return MethodType(found.__func__, owner if is_a(owner, type) else type(owner))
    return _UNKNOWN if is_a(found, property) else found


def _item(owner: Any, key: object) -> Any:
    if issubclass(type(owner), torch.nn.ModuleDict | torch.nn.ModuleList):
        return owner.__dict__.get(internals.MODULES, {}).get(str(key), _UNKNOWN)
    if type(owner) in {dict, list, tuple}:
        try:
            return owner[key]
        except (LookupError, TypeError) as error:
            if is_users(error):
                raise
            return _UNKNOWN
    return _UNKNOWN


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError as error:  # empty
        if is_users(error):
            raise
        return _UNKNOWN


def _parameters(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]


def _heads(node: ast.stmt) -> list[ast.AST]:
    """Return the expressions of a compound statement that are evaluated before its body."""
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr) and not hasattr(child, "body")]


def _span(node: ast.AST) -> tuple[int, int]:
    first = int(getattr(node, "lineno", 0))
    return first, int(getattr(node, "end_lineno", None) or first)


def _line(node: ast.AST) -> int:
    """Return the line on which the name of a method stands, of an operator the line on which it begins."""
    return int(getattr(node, "end_lineno" if isinstance(node, ast.Attribute) else "lineno", 0))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def kinds_of_call(name: str, owner: Any) -> Kinds:
    """Return the possible kinds of the autograd nodes that a function or method call makes, one set for each node.

    Args:
        owner: what the method is called on, where that is known.
    """
    if name == "apply" and isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return _sets(owner.__name__.lower())
    plain = name.strip("_").replace("_", "").lower()
    return _sets(_MADE.get(plain, plain)) if plain else ()


def kinds_of_operator(node: ast.AST) -> Kinds:
    """Return the possible kinds of the autograd nodes that an operator makes; empty for anything else."""
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
