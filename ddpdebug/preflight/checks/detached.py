"""Parameters on which the loss depends while no gradient reaches them: the graph is cut on the way (RCP810)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.sandbox.trials import looking
from ddpdebug.preflight.subject import Subject

_SEED = 7
#: Parameters that are tried: the ones behind the same cut behave alike.
_TRIED = 12


def cut_off(subject: Subject, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return which of the parameters the loss depends on: those used with gradients enabled, and those without.

    Each is changed a little; where the loss changes, the forward uses it.
    """
    enabled, base = _base(subject)
    if base is None or base != _loss(subject, copied(subject.model)):  # not deterministic even from one seed
        return [], []
    with_grad: list[str] = []
    without: list[str] = []
    for name in _spread(names):
        model = copied(subject.model)
        parameter = dict(model.named_parameters())[name]
        with torch.no_grad():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(_SEED))
            parameter.add_(
                0.1 * (float(parameter.std()) if parameter.numel() > 1 else 1.0) * noise.to(parameter) + 1e-3
            )
        if _loss(subject, model) != base:
            (with_grad if enabled.get(name.rpartition(".")[0], True) else without).append(name)
    return with_grad, without


def _spread(names: Sequence[str]) -> Sequence[str]:
    step = max(1, len(names) // _TRIED)
    return names[::step][:_TRIED]


def _base(subject: Subject) -> tuple[dict[str, bool], float | None]:
    """Return by module whether it was called with gradients enabled, and the loss."""
    model, enabled = copied(subject.model), dict[str, bool]()

    def note(name: str, *_: Any) -> None:
        enabled[name] = enabled.get(name, False) or torch.is_grad_enabled()

    with looking(dict(model.named_modules()), before=note):
        return enabled, _loss(subject, model)


def _loss(subject: Subject, model: nn.Module) -> float | None:
    torch.manual_seed(_SEED)
    value = float(subject.loss_of(model, subject.batches[0])[0].detach())
    return value if value == value else None  # noqa: PLR0124 - not a number equals nothing
