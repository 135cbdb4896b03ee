"""The distribution of the inputs of the first layer with weights, over a model's first training forwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ddpdebug.isolation.foreign import is_a
from ddpdebug.probes.entries import Entries
from ddpdebug.schema.announcements import InputStatistics
from ddpdebug.torch_internals import anything_compiled, is_plain

#: Forwards that are looked at.
FORWARDS = 4
_LEAST, _MOST = 16, 1 << 22
#: Inputs above are not compared with bytes; what a rule takes for bytes ends at a tenth of it.
_SMALL = 10 / 255
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)


class _Seen(NamedTuple):
    """One input."""

    mean: float
    std: float
    low: float
    high: float
    rest: float | None  # see `InputStatistics.from_bytes`


class Inputs:
    """The probe of one model's inputs, which removes itself."""

    def __init__(self, announce: Callable[[InputStatistics], None], entries: Entries) -> None:
        self._announce = announce
        self._hook = entries.before_modules("probe:inputs", self._look)
        self._seen: list[_Seen] = []
        self._layer, self._missed = "", 0
        self._given: Callable[[], Sequence[torch.Tensor]] = tuple  # what the forward was called with
        self.over = False

    def begin(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Observe the forward that begins now, with these tensors."""
        if not self.over and not self._hook.is_on and not anything_compiled():
            self._given = tensors
            self._hook.on()

    def release(self) -> None:
        """Remove the hook."""
        self._hook.off()
        self._given = tuple

    def end(self) -> None:
        """Remove the hook; announce the statistics after enough forwards, give up if forwards have no such layer."""
        self._missed += self._hook.is_on
        self.over = self.over or self._missed >= FORWARDS
        self.release()
        if len(self._seen) >= FORWARDS and not self.over:
            self.over = True
            means, stds, lows, highs, rests = zip(*self._seen, strict=True)
            self._announce(
                InputStatistics(
                    layer=self._layer,
                    mean=math.fsum(means) / len(means),
                    std=math.fsum(stds) / len(stds),
                    min=min(lows),
                    max=max(highs),
                    from_bytes=None if None in rests else max(rests),
                )
            )

    def _look(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, _NORMS):
            self.over = True  # the model brings its inputs into shape by itself
        if self.over or not self._hook.is_on or not isinstance(module, _LAYERS):
            return
        tensor = args[0] if args else None
        if not is_a(tensor, torch.Tensor) or not _readable(tensor):
            self.over = True
            self.release()
            return
        seen = _look(tensor.detach())
        if seen.low == seen.high and not self._is_given(tensor):
            return  # what the model itself begins with: the first state of a recurrent cell
        self.release()
        self._layer = type(module).__name__
        self._seen.append(seen)

    def _is_given(self, tensor: torch.Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return any([is_plain(t) and t.untyped_storage().data_ptr() == place for t in self._given()])


def _readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is data that came from outside and can be read at once."""
    usual = is_plain(tensor) and tensor.is_floating_point() and tensor.device.type == "cpu"
    return usual and not tensor.requires_grad and _LEAST <= tensor.numel() <= _MOST


def _look(tensor: torch.Tensor) -> _Seen:
    values = tensor.float()
    std, mean = torch.std_mean(values)
    low, high = map(float, values.aminmax())
    rest = None
    if low >= 0 and 0 < high <= _SMALL:
        grey = values * (255 * 255)
        rest = float((grey - grey.round()).abs().max())
    return _Seen(float(mean), float(std), low, high, rest)
