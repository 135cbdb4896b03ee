"""How the input of the first layer that has weights is distributed, over a model's first training forwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpdebug.probes.entries import Entries
from ddpdebug.schema.announcements import InputStatistics
from ddpdebug.torch_internals import anything_compiled, is_plain

#: Forwards that are looked at.
FORWARDS = 4
_LEAST, _MOST = 16, 1 << 22
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)


class Inputs:
    """Looks at one model's inputs, and takes itself away."""

    def __init__(self, announce: Callable[[InputStatistics], None], entries: Entries) -> None:
        self._announce = announce
        self._hook = entries.before_modules("probe:inputs", self._look)
        self._seen: list[dict[str, float]] = []
        self._layer = ""
        self.over = False

    def begin(self) -> None:
        """Look at the forward that begins now."""
        if not self.over and not self._hook.is_on and not anything_compiled():
            self._hook.on()

    def release(self) -> None:
        """Take the hook away."""
        self._hook.off()

    def end(self) -> None:
        """Take the hook away; announce once enough was seen."""
        self.release()
        if len(self._seen) >= FORWARDS and not self.over:
            self.over = True
            number = len(self._seen)
            self._announce(
                InputStatistics(
                    layer=self._layer,
                    mean=math.fsum(s["mean"] for s in self._seen) / number,
                    std=math.fsum(s["std"] for s in self._seen) / number,
                    min=min(s["min"] for s in self._seen),
                    max=max(s["max"] for s in self._seen),
                    twice=all(s["twice"] for s in self._seen),
                )
            )

    def _look(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, _NORMS):
            self.over = True  # the model brings its inputs into shape by itself
        if self.over or not self._hook.is_on or not isinstance(module, _LAYERS):
            return
        self.release()
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or not _readable(tensor):
            self.over = True
            return
        self._layer = type(module).__name__
        self._seen.append(_look(tensor.detach()))


def _readable(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is data that came from outside and can be read at once."""
    usual = is_plain(tensor) and tensor.is_floating_point() and tensor.device.type == "cpu"
    return usual and not tensor.requires_grad and _LEAST <= tensor.numel() <= _MOST


def _look(tensor: torch.Tensor) -> dict[str, float]:
    values = tensor.float()
    std, mean = torch.std_mean(values)
    low, high = values.aminmax()
    found = {"mean": float(mean), "std": float(std), "min": float(low), "max": float(high), "twice": 0.0}
    if found["min"] >= 0 and 0 < found["max"] <= 1.01 / 255:
        grey = values * (255 * 255)  # bytes that were divided by 255 twice are whole numbers again
        found["twice"] = float(bool((grey - grey.round()).abs().max() < 0.02))
    return found
