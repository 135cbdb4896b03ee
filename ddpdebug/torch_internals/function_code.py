"""Replaces the code of a torch function by its own source with a callback in it; the function object stays the same.

A wrapper in a function's place would be seen: by pickle (a reference that was taken before or is kept after is no
longer the object of that name), by `torch.compile` and `__torch_function__` tables (which know functions by identity),
by `inspect` (its parameters and globals are its own), by whoever counts the frames of the stack, by whoever has
imported it earlier, who would call past it. The new code has the same lines, the same parameters and the same name, so
that tracebacks, warnings and signatures are as before. Several looks lie in one function, each until it is taken away.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import torch

from ddpdebug import source_lines

#: Changes the source of a function: its module, and its definition in there.
Change = Callable[[ast.Module, ast.FunctionDef], object]

#: The local variable in which a look keeps what it needs at the end of the call.
NOTED = "ddpdebug_noted"
_LOOK = "ddpdebug: the look around a call"  # stands in the source for it
_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_NO_BODY = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class InCode:
    """What lies in a function's code. Where that code is pickled by value, its copy has one that looks at nothing."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"idle": True, "of": frozenset[int]()}


class Called(partial[None], InCode):
    """A function that is called from a function's code; its copy does nothing."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Passed(partial[Any], InCode):
    """A function of one value that returns it, likewise; its copy does that alone."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (cast, None)


class Around(Protocol):
    """Callbacks around a call; none of them raises unless the user has asked for it."""

    @property
    def idle(self) -> bool:
        """Whether no call is observed."""

    def begins(self, args: Any, kwargs: Any) -> Any:
        """Observe a call that begins; the return value is passed to `ended` or `failed`."""

    def ended(self, noted: Any, result: Any) -> Any:
        """Observe the result of a call, and return it."""

    def failed(self, noted: Any) -> None:
        """Observe the exception that leaves a call."""


class _Look(NamedTuple):
    change: Change
    constants: Mapping[str, Any]  # what stands in the code for the names that `change` has written
    kind: Hashable  # looks of one kind make the same change to the same code


class _Woven:
    """A function's own code and the looks in it."""

    def __init__(self, plain: CodeType) -> None:
        self.plain = self.code = plain
        self.looks: list[_Look] = []


_woven: weakref.WeakKeyDictionary[FunctionType, _Woven] = weakref.WeakKeyDictionary()
#: Code with the constants that stand for looks, by the function's own code and the kinds of looks in it: reading and
#: compiling a function takes some milliseconds, and a second monitor asks for the same.
_made: dict[tuple[CodeType, tuple[Hashable, ...]], CodeType | None] = {}


def weave(
    function: FunctionType, change: Change, constants: Mapping[str, Any], kind: Hashable
) -> Callable[[], None] | None:
    """Put a callback into a function's code, as `change` writes it into the source; return the undo function.

    What `change` adds has to say where it stands. None where the function's source is not at hand, or not that of its
    code.

    Args:
        constants: what stands in the code for constants that `change` has written: an `InCode` each.
        kind: of the change; two of a kind make the same of the same function.
    """
    assert all([isinstance(one, InCode) for one in constants.values()])
    woven = _woven.get(function)
    if woven is None or function.__code__ is not woven.code:  # somebody else has changed it since
        woven = _Woven(function.__code__)
    look = _Look(change, constants, kind)
    code = _with_looks(function, woven.plain, [*woven.looks, look])
    if code is None:
        return None
    woven.looks.append(look)
    _woven[function] = woven
    function.__code__ = woven.code = code

    def undo() -> None:
        left = [one for one in woven.looks if one is not look]
        code = _with_looks(function, woven.plain, left) if left else woven.plain
        if function.__code__ is woven.code and code is not None:
            woven.looks, woven.code = left, code
            function.__code__ = code

    return undo


def _is_woven(function: FunctionType) -> bool:
    """Whether a function's code is the one with looks in it."""
    woven = _woven.get(function)
    return woven is not None and bool(woven.looks) and function.__code__ is woven.code


def all_of(undo: Iterable[Callable[[], None] | None]) -> Callable[[], None]:
    """Return a function that calls all of the given undo functions."""
    found = [one for one in undo if one is not None]

    def undo_all() -> None:
        for one in found:
            one()

    return undo_all


class _Several(InCode):
    """Several looks around the same calls."""

    def __init__(self, looks: Sequence[Any]) -> None:
        self._looks = tuple(looks)

    @property
    def idle(self) -> bool:
        return all([look.idle for look in self._looks])

    @property
    def of(self) -> set[int]:
        return {one for look in self._looks for one in look.of}

    def begins(self, args: Any, kwargs: Any) -> list[Any]:
        return [look.begins(args, kwargs) for look in self._looks]

    def ended(self, noted: list[Any], result: Any) -> Any:
        for look, its in zip(self._looks, noted, strict=True):
            look.ended(its, result)
        return result

    def failed(self, noted: list[Any]) -> None:
        for look, its in zip(self._looks, noted, strict=True):
            look.failed(its)


class _AroundNow(NamedTuple):
    looks: list[Around]
    undo: Callable[[], None]


def asked_by_woven_code(kind: type[InCode]) -> list[Any]:
    """Return the functions of properties that changed code reads, of a kind of looks and of several ones."""
    read = [vars(one).get(name) for one in (kind, _Several) for name in ("idle", "of")]
    return [one.fget for one in read if isinstance(one, property)]


_around: weakref.WeakKeyDictionary[FunctionType, dict[str, _AroundNow]] = weakref.WeakKeyDictionary()


def look_around(function: FunctionType, look: Around, also: str = "") -> Callable[[], None] | None:
    """Put callbacks before and after a function's body into its code; they are absent during compilation.

    Args:
        also: one more condition, in the function's own variables and with `look`, for a call that is not looked at.
    """
    now = _around.get(function, {}).get(also)
    others = now.looks if now is not None and _is_woven(function) else []
    if not _put_around(function, [*others, look], also):
        return None

    def undo() -> None:
        now = _around.get(function, {}).get(also)
        if now is not None:
            _put_around(function, [one for one in now.looks if one is not look], also)

    return undo


def lies_around(look: Around, function: Any) -> bool:
    """Whether these callbacks are in a function's code, possibly among others."""
    if not isinstance(function, FunctionType) or not _is_woven(function):
        return False
    return any([one is look for kind in _around.get(function, {}).values() for one in kind.looks])


def _put_around(function: FunctionType, looks: list[Around], also: str) -> bool:
    """Put all the looks of one kind that lie around the body in place: it stands there twice, however many they are."""
    kinds = _around.setdefault(function, {})
    if (now := kinds.pop(also, None)) is not None:
        now.undo()
    if not looks:
        return True
    undo = _weave_around(function, looks[0] if len(looks) == 1 else _Several(looks), also)
    if undo is not None:
        kinds[also] = _AroundNow(looks, undo)
    return undo is not None


def _weave_around(function: FunctionType, look: Around, also: str) -> Callable[[], None] | None:
    if function.__code__.co_flags & _NO_BODY:
        return None
    code, defaults = function.__code__, len(function.__defaults__ or ())
    has_torch = function.__globals__.get("torch") is torch
    noted, constant = (f"{NOTED}_", f"{_LOOK}{also}") if also else (NOTED, _LOOK)

    def change(_: ast.Module, definition: ast.FunctionDef) -> None:
        said = 0 if ast.get_docstring(definition) is None else 1
        taken = _Globals()
        rest = [taken.visit(one) for one in definition.body[said:]]
        home = "torch" if has_torch else noted
        unseen = f"{home}.compiler.is_dynamo_compiling() or look.idle{also}".replace("look.", f"{constant!r}.")
        call = f"{constant!r}.begins({', '.join(_arguments(definition.args, code.co_posonlyargcount, defaults))})"
        template = ast.parse(
            f"if {unseen}:\n pass\nelse:\n {noted} = {call}\n try:\n  pass\n"
            f" except BaseException:\n  {constant!r}.failed({noted})\n  raise"
        )
        if not has_torch:
            template.body.insert(0, ast.Import([ast.alias("torch", noted)]))
        for statement in template.body:
            _place(statement, rest[0])
        whole = template.body[-1]
        assert isinstance(whole, ast.If)
        attempt = whole.orelse[-1]
        assert isinstance(attempt, ast.Try)
        attempt.body = [_in_returns(one, noted, constant) for one in rest]
        whole.body = rest
        attempt.body = _with_end(attempt.body, f"return {constant!r}.ended({noted}, None)")
        definition.body[said:] = [*taken.found, *template.body]

    return weave(function, change, {constant: look}, (also, defaults, has_torch))


def call_of(placeholder: str, arguments: list[ast.expr]) -> ast.Call:
    """Return the syntax tree of a call of a constant (the hook); compiling `1()` directly would print a warning."""
    look = ast.BoolOp(op=ast.Or(), values=[ast.Constant(placeholder), ast.Constant(None)])
    return ast.Call(func=look, args=arguments, keywords=[])


def _arguments(arguments: ast.arguments, positional_only: int, defaults: int) -> tuple[str, str]:
    """Write down what a function is called with: a tuple, and a dictionary of what has a default value."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = len(names) if arguments.vararg is not None else max(positional_only, len(names) - defaults)
    by_position = [*names[:required], *([f"*{arguments.vararg.arg}"] if arguments.vararg is not None else [])]
    by_name = [*names[required:], *(argument.arg for argument in arguments.kwonlyargs)]
    entries = [f"{name!r}: {name}" for name in by_name]
    entries += [f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else []
    return f"({''.join(f'{one}, ' for one in by_position)})", f"{{{', '.join(entries)}}}"


def _place(node: Any, where: ast.stmt) -> Any:
    """Let everything that is new stand where a statement begins."""
    for new in ast.walk(node):
        if isinstance(new, ast.expr | ast.stmt | ast.excepthandler | ast.alias):
            new.lineno = new.end_lineno = where.lineno
            new.col_offset = new.end_col_offset = where.col_offset
    return node


def _with_end(body: list[ast.stmt], text: str) -> list[ast.stmt]:
    """Return statements with one more where they fall off their end, in the line from which Python returns there."""
    last = body[-1]
    if isinstance(last, ast.Return | ast.Raise):
        return body
    end = _place(ast.parse(text).body[0], last)
    if isinstance(last, ast.Try) and not last.finalbody:
        tried = copy.copy(last)
        part = "orelse" if last.orelse else "body"
        vars(tried)[part] = _with_end(getattr(last, part), text)
        tried.handlers = [copy.copy(handler) for handler in last.handlers]
        for handler in tried.handlers:
            handler.body = _with_end(handler.body, text)
        return [*body[:-1], tried]
    if not isinstance(last, ast.If):
        return [*body, end]
    branched = copy.copy(last)
    branched.body = _with_end(last.body, text)
    branched.orelse = _with_end(last.orelse, text) if last.orelse else [end]
    return [*body[:-1], branched]


class _Globals(ast.NodeTransformer):
    """Takes the `global` statements out of a function: its body stands twice, and they come before any use."""

    def __init__(self) -> None:
        self.found: list[ast.stmt] = []

    def visit_Global(self, node: ast.Global) -> ast.Pass:
        self.found.append(node)
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node  # its own scope

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node


def _in_returns(node: Any, noted: str, constant: str) -> Any:
    """Return a part of a function with the look around what it returns; what does not change is shared."""
    if isinstance(node, ast.Return):
        value = node.value or ast.copy_location(ast.Constant(None), node)
        called = ast.Attribute(ast.Constant(constant), "ended", ast.Load())
        call = ast.Call(called, [ast.Name(noted, ast.Load()), value], [])
        for new in (called, called.value, call, call.args[0]):
            ast.copy_location(new, value)
        return ast.copy_location(ast.Return(call), node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
        return node  # what these return is another story
    changed = node
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        if parts := getattr(node, name, None):
            changed = copy.copy(node) if changed is node else changed
            vars(changed)[name] = [_in_returns(part, noted, constant) for part in parts]
    return changed


def _with_looks(function: FunctionType, original: CodeType, looks: list[_Look]) -> CodeType | None:
    """Return a function's code with looks in it."""
    key = original, tuple([look.kind for look in looks])
    if key not in _made:
        _made[key] = _made_with(function, original, looks)
    code = _made[key]
    put = {name: value for look in looks for name, value in look.constants.items()}
    return None if code is None else _filled(code, put)


def _made_with(function: FunctionType, original: CodeType, looks: list[_Look]) -> CodeType | None:
    """Return the code with the constants that stand for the looks."""
    for imported in _imports(function, original):
        tree = _source(original, function.__globals__)
        if tree is None:
            return None
        if imported:  # calls on what is imported differ
            tree.body.insert(0, ast.fix_missing_locations(ast.Import([ast.alias(name) for name in imported])))
        plain = _compiled(tree, original)
        if plain is None or not _is_alike(plain, original):
            continue
        definition = _definition(tree, original)
        for look in looks:
            look.change(tree, definition)
        code = _compiled(tree, original)
        if code is None or code.co_flags != original.co_flags or code.co_firstlineno != original.co_firstlineno:
            return None
        if (code.co_freevars, code.co_cellvars) != (original.co_freevars, original.co_cellvars):
            return None
        return code
    return None


def _filled(code: CodeType, put: Mapping[str, Any]) -> CodeType:
    return code.replace(co_consts=tuple([put.get(c, c) if isinstance(c, str) else c for c in code.co_consts]))


def _is_alike(plain: CodeType, original: CodeType) -> bool:
    """Whether the source is that of the code."""
    names = "co_code", "co_varnames", "co_names", "co_freevars", "co_cellvars"
    return all([getattr(plain, name) == getattr(original, name) for name in names])


def _imports(function: FunctionType, code: CodeType) -> Iterator[list[str]]:
    """Yield which of the names that a function uses may have been imported."""
    known = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    modules = [name for name, value in known.items() if isinstance(value, ModuleType)]
    yield modules
    own = function.__globals__.get("__name__")
    things = {name: value for name, value in known.items() if isinstance(value, type | FunctionType)}
    others = [name for name, value in things.items() if value.__module__ != own]
    if others:
        yield [*modules, *(name for name in others if name not in modules)]


def _source(code: CodeType, space: dict[str, Any]) -> ast.Module | None:
    """Return a function's source as a tree, inside of a class and a function like those around it."""
    lines = source_lines.getlines(code.co_filename, space)[code.co_firstlineno - 1 :]
    if not lines:
        return None
    depth, end = _indent(lines[0]), _last_line(code) - code.co_firstlineno + 1
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > depth):
        end += 1  # of a statement of many lines the code knows only some
    block = lines[:end]
    around = code.co_qualname.split(".")[:-1]
    kind = around[-1] if around and around[-1] != "<locals>" else None
    variables = [name for name in code.co_freevars if not (kind and name == "__class__")]
    heads = [f"def _({', '.join(variables)}):"] if variables else []
    heads += [f"class {kind}:"] if kind else []
    heads = heads or (["if True:"] if depth else [])
    if len(heads) > depth or len(heads) > code.co_firstlineno - 1:
        return None
    text = [" " * i + head + "\n" for i, head in enumerate(heads)] + block
    try:
        tree = ast.parse("\n" * (code.co_firstlineno - 1 - len(heads)) + "".join(text))
        definition = _definition(tree, code)
    except (SyntaxError, StopIteration):
        return None
    _strip(definition)
    return tree


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _last_line(code: CodeType) -> int:
    inner = (_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return max(*(line or 0 for _, _, line in code.co_lines()), *inner, code.co_firstlineno)


def _definition(tree: ast.Module, code: CodeType) -> ast.FunctionDef:
    """Return the definition of a function in its source: the last statement of what stands around it.

    Raises:
        StopIteration: it is not there.
    """
    node: Any = tree
    while getattr(node, "body", None):
        node = node.body[-1]
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if min([node.lineno, *[one.lineno for one in node.decorator_list]]) == code.co_firstlineno:
            return node
    raise StopIteration


def _strip(definition: ast.FunctionDef) -> None:
    """Leave only what becomes code: annotations and defaults belong to the function that exists.

    So do decorators, whose lines are those at which the code begins.
    """
    arguments = definition.args
    definition.returns = None
    starred = (argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None)
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred):
        argument.annotation = None
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)


def _compiled(tree: ast.Module, original: CodeType) -> CodeType | None:
    flags = original.co_flags & _FUTURES
    module = compile(tree, original.co_filename, "exec", flags=flags, dont_inherit=True)
    code = next(iter([*_named(module, original)]), None)
    return None if code is None else code.replace(co_qualname=original.co_qualname)


def _named(code: CodeType, original: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if (constant.co_name, constant.co_firstlineno) == (original.co_name, original.co_firstlineno):
                yield constant
            yield from _named(constant, original)
