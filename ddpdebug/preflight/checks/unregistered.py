"""Modules that the forward calls but the model has not registered: those in a plain list or dict (RCP817)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ddpdebug.nested import parts_of
from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.preflight.sandbox.trials import looking
from ddpdebug.preflight.subject import Subject

_DEPTH = 3
_ITEMS = 200


def unregistered(subject: Subject) -> Iterator[Check]:
    """Find modules with parameters that the forward calls from plain attributes of the model's modules (RCP817)."""
    model = copied(subject.model)
    known = {id(module) for module in model.modules()}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not attribute.startswith("_"):
                for path, hidden in _modules_in(value, f"{name}.{attribute}".lstrip("."), 0):
                    if id(hidden) not in known and any(p.requires_grad for p in hidden.parameters()):
                        found.setdefault(path, hidden)
    called = _called(subject, model, found) if found else {}
    if called:
        yield Check(
            Status.FAIL,
            f"the forward calls {', '.join(called)}, which the model does not hold as parts: their parameters "
            "are not in `model.parameters()`",
            code="RCP817",
            evidence={"modules": {path: type(module).__name__ for path, module in called.items()}},
            hypotheses=("modules in a plain list, tuple or dict",),
            actions=("use `nn.ModuleList` or `nn.ModuleDict`",),
        )
    else:
        yield Check(Status.PASS, "every module that is kept in the model is one of its parts")


def _modules_in(value: Any, path: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
    elif depth < _DEPTH and (parts := parts_of(value)) is not None and len(parts) <= _ITEMS:
        for place, item in parts:
            yield from _modules_in(item, f"{path}{place}", depth + 1)


def _called(subject: Subject, model: nn.Module, hidden: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those that a forward with gradient calls; a teacher under `no_grad` is hidden on purpose."""
    found: dict[str, nn.Module] = {}

    def note(path: str, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            found[path] = module

    if subject.batches:
        with looking(hidden, before=note):
            subject.loss_of(model, subject.batches[0])
    return found
