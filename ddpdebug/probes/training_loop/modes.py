"""Train and eval mode of the modules that behave by it: in forwards that train, and in those without gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ddpdebug import torch_internals as internals

#: Runs of so many forwards without gradients are told: few are, and one or two views of a target network in each step
#: would use that up.
EVALUATION = 3
#: The same where a loader over another data set was begun for them: a small set, a share of one on each rank.
OF_OTHER_DATA = 2
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_Known = list[tuple[str, weakref.ref[nn.Module]]]


def sensitive(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the mode changes and that belong to a part of the model that trains."""
    table = dict(internals.named_modules(root))
    for name, module in table.items():
        if not name or not _changes(module):
            continue
        parents = [table[parent] for parent in _parents(name) if parent in table]
        holder = next(iter([m for m in (module, *parents) if internals.first_parameter(m) is not None]), root)
        if any([p.requires_grad for p in internals.parameters(holder)]):
            yield name, module


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _changes(module: nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    if isinstance(module, _NORMS):
        return bool(module.track_running_stats)
    rate = module.dropout if isinstance(module, nn.RNNBase | nn.MultiheadAttention) else 0.0
    return isinstance(rate, float) and rate > 0


class InEval(NamedTuple):
    """Modules of a model in eval mode that behave by their mode."""

    names: list[str]  # of those in eval mode
    mixed: bool  # some are in train mode


class Modes:
    """Watches the modes of the models' forwards."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[nn.Module], _Known]] = {}

    def of(self, root: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return a model's modules that the mode changes."""
        known = self._known.get(id(root))
        if known is None or known[0]() is not root:
            found: _Known = [(name, weakref.ref(module)) for name, module in sensitive(root)]
            known = self._known[id(root)] = (weakref.ref(root), found)
        return [(name, module) for name, ref in known[1] if (module := ref()) is not None]

    def in_eval(self, root: nn.Module) -> InEval | None:
        """Return the modes of the modules that the mode changes, None where the model is in train mode."""
        if root.training:
            return None
        found = self.of(root)
        return InEval([name for name, module in found if not module.training], any([m.training for _, m in found]))

    def evaluates_in_train(self, root: nn.Module) -> bool:
        """Tell whether a forward without gradients depends on chance, or changes running statistics.

        BatchNorm without momentum collects statistics for averaged weights on purpose.
        """
        if not root.training:
            return False
        return any([m.training and getattr(m, "momentum", 0) is not None for _, m in self.of(root)])


def has_input_with_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether the gradient of an input is wanted: adversarial examples, saliency, penalties."""
    return any([tensor.requires_grad and tensor.is_leaf for tensor in tensors])
