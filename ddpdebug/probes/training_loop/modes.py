"""Train and eval mode of modules that depend on it: in training forwards, and in those without gradients."""

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
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

#: Modules of a model in train mode that are looked at in a forward.
_LOOKED_AT = 64

_Known = list[tuple[str, weakref.ref[nn.Module]]]


def sensitive(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that depend on their mode and belong to a part of the model that trains."""
    table = dict(internals.named_modules(root))
    for name, module in table.items():
        if not name or not changes(module):
            continue
        parents = [table[parent] for parent in _parents(name) if parent in table]
        holder = next(iter([m for m in (module, *parents) if internals.first_parameter(m) is not None]), root)
        if any([p.requires_grad for p in internals.parameters(holder)]):
            yield name, module


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def changes(module: nn.Module) -> bool:
    """Return whether a module depends on its mode."""
    if isinstance(module, DROPOUTS):
        return module.p > 0
    if isinstance(module, NORMS):
        return bool(module.track_running_stats)
    rate = module.dropout if isinstance(module, nn.RNNBase | nn.MultiheadAttention) else 0.0
    return isinstance(rate, float) and rate > 0


class InEval(NamedTuple):
    """Mode-dependent modules in eval mode: of a whole model, or of a part of one in train mode."""

    names: list[str]  # of those in eval mode
    mixed: bool  # some are in train mode, and nothing says that this was not chosen
    part: str | None = None  # the path of the part


class Modes:
    """The probe of modes in the models' forwards."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[nn.Module], _Known]] = {}
        self._parts: dict[int, tuple[list[str], InEval | None]] = {}  # what was said of these modules of a root

    def of(self, root: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return a model's modules that depend on their mode."""
        known = self._known.get(id(root))
        if known is None or known[0]() is not root:
            found: _Known = [(name, weakref.ref(module)) for name, module in sensitive(root)]
            known = self._known[id(root)] = (weakref.ref(root), found)
        return [(name, module) for name, ref in known[1] if (module := ref()) is not None]

    def in_eval(self, root: nn.Module) -> InEval | None:
        """Return the mode-dependent modules in eval mode; None if all are in train mode, or some are not on purpose."""
        found = self.of(root)
        if internals.in_train_mode(root):
            return self._part_in_eval(root, found)
        return InEval(
            [name for name, module in found if not internals.in_train_mode(module)],
            any([internals.in_train_mode(m) for _, m in found]),
        )

    def _part_in_eval(self, root: nn.Module, found: Sequence[tuple[str, nn.Module]]) -> InEval | None:
        """Return the modules that drop something in a part that is in eval mode as a whole, although all of it trains.

        Of a part that holds frozen parameters, and of single modules, somebody has chosen the mode.
        """
        still = [
            name
            for name, module in found[:_LOOKED_AT]
            if not internals.in_train_mode(module) and not isinstance(module, NORMS)
        ]
        if not still:
            return None
        known = self._parts.get(id(root))
        if known is None or known[0] != still:
            known = self._parts[id(root)] = (still, _part_of(root, still))
        return known[1]

    def evaluates_in_train(self, root: nn.Module) -> bool:
        """Return whether a forward without gradients is random, or changes running statistics, because of train mode.

        BatchNorm without momentum collects statistics for averaged weights on purpose.
        """
        if not internals.in_train_mode(root):
            return False
        return any(
            [
                internals.in_train_mode(m) and internals.own_attribute(m, "momentum", 0) is not None
                for _, m in self.of(root)
            ]
        )


def _part_of(root: nn.Module, still: Sequence[str]) -> InEval | None:
    table = dict(internals.named_modules(root))
    for name in still:
        paths = [path for path in _parents(name) if path and path in table and not internals.in_train_mode(table[path])]
        trains = [p.requires_grad for p in internals.parameters(table[paths[-1]])] if paths else []
        if trains and all(trains):
            inside = [other for other in still if other.startswith(paths[-1] + ".")]
            return InEval(inside, mixed=False, part=paths[-1])
    return None


def has_input_with_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether an input needs a gradient: adversarial examples, saliency, penalties."""
    return any([tensor.requires_grad and tensor.is_leaf for tensor in tensors])
