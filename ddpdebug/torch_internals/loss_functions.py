"""Callbacks in the loss functions of `torch.nn.functional`, for calls without gradients.

Only where the user has asked for it (`--validation-loss functions`): it changes functions for the whole process.

A wrapper in their place would be seen (`function_code.py`; by TorchScript too, which compiles their source). Hooks of
modules do not see functions, and a mode would see every operation. So the functions stay what they are, and their code
is exchanged: the same source with the same lines, but what it returns without gradients is looked at first. With
gradients that is one question to torch; while something is compiled the look is left out. Guards of `torch.compile`
hold the code of the functions that a graph calls: what was compiled with the look is compiled once more after it has
been taken away, so it is not put in place where something was compiled before.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from ddpdebug.torch_internals import names
from ddpdebug.torch_internals.function_code import Passed, all_of, call_of, weave

#: Those whose value is a loss, and which the modules of the same names call.
LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)
#: What all loss modules of `torch.nn` inherit from; nothing where this torch has no such class.
LOSS_MODULES: tuple[type[torch.nn.Module], ...] = () if names.loss_module is None else (names.loss_module,)
_PLACEHOLDER = "ddpdebug: the look at the loss"
_UNSEEN = "torch.is_grad_enabled() or torch.compiler.is_compiling()"


def look_at_losses(look: Callable[[Any, str], None]) -> Callable[[], None]:
    """Have `look` called with each loss computed without gradients; return the function that undoes it.

    Args:
        look: takes the value and by what it was computed, in words.
    """
    undo: list[Callable[[], None] | None] = []
    for name in LOSSES:
        function = getattr(functional, name, None)
        if not isinstance(function, FunctionType) or function.__globals__ is not vars(functional):
            continue  # the user has replaced this function: it is left alone
        source = f"by torch.nn.functional.{name} (--validation-loss functions)"
        undo.append(weave(function, _in_returns, {_PLACEHOLDER: Passed(_seen, look, source)}, _PLACEHOLDER))
    return all_of(undo)


def _in_returns(tree: ast.Module, _: ast.FunctionDef) -> None:
    ast.fix_missing_locations(_Returns().visit(tree))


def _seen(look: Callable[[Any, str], None], source: str, result: Any) -> Any:
    look(result, source)
    return result


class _Returns(ast.NodeTransformer):
    """Puts the look around what is returned, except where another class of tensor takes the call over."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        value = node.value
        called = value.func if isinstance(value, ast.Call) else None
        if value is None or (isinstance(called, ast.Name) and called.id == "handle_torch_function"):
            return node
        looked_at = call_of(_PLACEHOLDER, [copy.deepcopy(value)])
        unseen = ast.parse(_UNSEEN, mode="eval").body
        for new in ast.walk(unseen):
            ast.copy_location(new, node)
        node.value = ast.copy_location(ast.IfExp(test=unseen, body=value, orelse=looked_at), value)
        return node


def is_readable(loss: object) -> bool:
    """Whether this is one number that may be read now: no trace, capture or mode records operations."""
    if names.without_function is None or type(loss) is not torch.Tensor:
        return False
    if loss.is_meta or loss.layout is not torch.strided or names.is_functorch_wrapped(loss):
        return False
    if loss.dim() or loss.is_complex() or loss.is_quantized:
        return False
    if names.is_tracing() or names.dispatch_modes():
        return False
    return not (loss.is_cuda and torch.cuda.is_current_stream_capturing())


def aside() -> AbstractContextManager[object]:
    """Return a context in which operations on a loss bypass the user's `__torch_function__` and modes."""
    kept: AbstractContextManager[object] = names.without_function()
    return kept
