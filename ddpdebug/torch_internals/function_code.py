"""Exchanges the code of a function of torch's, which stays the same object, for its own source with a look in it.

A wrapper in a function's place would be seen: by pickle (a reference that was taken before or is kept after is no
longer the object of that name), by `torch.compile` and `__torch_function__` tables (which know functions by identity),
by whoever has imported it earlier, who would call past it. The new code has the same lines and the same variables, so
that tracebacks, warnings and signatures are as before.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any


def with_look(
    function: FunctionType, change: Callable[[ast.Module, ast.FunctionDef], object], looks: Mapping[str, Any]
) -> CodeType | None:
    """Return a function's code as `change` leaves its source, with looks where their names stand as constants.

    What `change` adds has to say where it stands. None where its source is not at hand, or not that of its code.
    """
    original = function.__code__
    try:
        tree = ast.parse("\n" * (original.co_firstlineno - 1) + inspect.getsource(function))
    except (OSError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or function.__closure__:
        return None
    _strip(definition)
    modules = [name for name in original.co_names if isinstance(function.__globals__.get(name), ModuleType)]
    if modules:  # calls on them differ
        tree.body.insert(0, ast.fix_missing_locations(ast.Import([ast.alias(name) for name in modules])))
    plain = _compiled(tree, original)
    if plain is None or (plain.co_code, plain.co_varnames) != (original.co_code, original.co_varnames):
        return None
    change(tree, definition)
    code = _compiled(tree, original)
    if code is None or code.co_flags != original.co_flags or code.co_firstlineno != original.co_firstlineno:
        return None
    return code.replace(co_consts=tuple(looks.get(c, c) if isinstance(c, str) else c for c in code.co_consts))


def exchange(codes: Iterable[tuple[FunctionType, CodeType]]) -> Callable[[], None]:
    """Give functions other code; return what gives each its own back, unless somebody else has changed it since."""
    changed = [(function, function.__code__, code) for function, code in codes]
    for function, _, code in changed:
        function.__code__ = code

    def undo() -> None:
        for function, original, code in changed:
            if function.__code__ is code:
                function.__code__ = original

    return undo


def call_of(placeholder: str, arguments: list[ast.expr]) -> ast.Call:
    """Return a call of the constant that stands for a look: written so that the compiler says nothing about it."""
    look = ast.BoolOp(op=ast.Or(), values=[ast.Constant(placeholder), ast.Constant(None)])
    return ast.Call(func=look, args=arguments, keywords=[])


def _strip(definition: ast.FunctionDef) -> None:
    """Leave only what becomes code: annotations and defaults belong to the function that exists.

    So do decorators, whose lines are those at which the code begins.
    """
    arguments = definition.args
    definition.returns = None
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)


def _compiled(tree: ast.Module, original: CodeType) -> CodeType | None:
    module = compile(tree, original.co_filename, "exec", dont_inherit=True)
    return next((c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == original.co_name), None)
