"""A module restored to the start of a forward, with new leaves as parameters. Nothing is put back afterwards.

Its parameters are replaced in the modules' tables by leaves that share their memory and have no past: DDP's hooks on
the job's own see nothing of a backward through them. What reaches the old ones by another way (a list of tensors) still
finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.nested import mapped


class Prepared:
    """A module that is ready to run, with its new parameters and its buffers.

    Args:
        buffers: values to start with, by name; the others start as they are now.
        modes: train/eval by name of the module.
    """

    def __init__(self, module: torch.nn.Module, buffers: Mapping[str, torch.Tensor], modes: Mapping[str, bool]) -> None:
        self.module = module
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a tensor, and what stands for it
        for name, part in internals.named_modules(module, remove_duplicate=False):
            part.training = modes.get(name, part.training)
            prefix = f"{name}." if name else ""
            tables = internals.module_tables(part)
            for key, parameter in tables[internals.PARAMETERS].items():
                if parameter is not None:
                    fresh = self._stand_in(parameter)
                    self.parameters.setdefault(prefix + key, fresh)
                    tables[internals.PARAMETERS][key] = fresh
            for key, buffer in tables[internals.BUFFERS].items():
                if buffer is not None:
                    fresh = self._buffer(buffer, buffers.get(prefix + key))
                    self.buffers.setdefault(prefix + key, fresh)
                    tables[internals.BUFFERS][key] = fresh

    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors that may get a gradient: the new parameters, and the original ones."""
        pairs = [pair for pair in self._known.values() if isinstance(pair[0], torch.nn.Parameter)]
        return list(dict.fromkeys(tensor for old, fresh in pairs for tensor in (fresh, old)))

    def argument(self, value: Any) -> Any:
        """Return an argument of the forward with tensors that have no graph; other objects stay the same."""
        return mapped(value, lambda item: self._stand_in(item) if isinstance(item, torch.Tensor) else item)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        fresh = tensor.detach()
        if isinstance(tensor, torch.nn.Parameter):
            fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            fresh.requires_grad_()
        self._known[id(tensor)], self._known[id(fresh)] = (tensor, fresh), (fresh, fresh)
        return fresh

    def _buffer(self, buffer: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        known = self._known.get(id(buffer))
        if known is not None:
            return known[1]
        fresh = buffer if given is None else given.detach().clone()
        self._known[id(buffer)] = buffer, fresh
        return fresh
