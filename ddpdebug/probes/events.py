"""What happens beside forward, backward and step: clipping, loss scaling, loads, gathers, observed losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ddpdebug.probes import async_copy as device
from ddpdebug.probes.values import loss_reader
from ddpdebug.schema.announcements import Announce, Gathered
from ddpdebug.schema.details import Clip, Load

if TYPE_CHECKING:
    from ddpdebug.probes.recorder import Recorder

#: Gathers that cut gradients are announced so often; the rest are other call sites of the same mistake.
_MAX_GATHERS = 3
_GATHERED_BYTES = 64 << 20


class Events:
    """Notes events in the recorder's current window."""

    def __init__(self, recorder: Recorder, announce: Announce) -> None:
        self._recorder, self._announce = recorder, announce
        self.last_loss_scale: Callable[[], float] | None = None
        self._scaled_by: torch.Tensor | None = None
        self.tells_validation = False  # the script does: nothing has to be guessed
        self._gathers = 0
        self._lists: list[tuple[list[Any], Gathered]] = []

    def clipped(self, norm: torch.Tensor, limit: float, location: str | None) -> None:
        """Note a gradient clipping; `before_sync` when it saw this rank's own gradients."""
        recorder = self._recorder
        local = any(w.pending is not None for w in recorder.wrappers) or (not recorder.wrappers and recorder.world > 1)
        value = float(norm) if norm.device.type == "cpu" else float("nan")
        recorder.window.clips.append(Clip(norm=value, max=float(limit), before_sync=local, location=location))

    def observed(self, name: str, loss: Any) -> None:
        """Take a loss from the user: `loss` instead of the one given to backward, or `val_loss`."""
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
        window, reader = self._recorder.window, loss_reader(value, None)
        if name == "loss":
            window.losses = [reader]
        else:
            self.tells_validation = True
            window.val_losses.append(reader)

    def note_scale(self, scale: torch.Tensor) -> None:
        """Note the loss scale in force; the tensor is changed in place later, so it is read or copied now."""
        self._scaled_by = scale.detach().clone()
        read = device.numbers([self._scaled_by])
        if scale.device.type == "cpu":
            value = read()[0]
            self.last_loss_scale = lambda: value
        else:
            self.last_loss_scale = lambda: read()[0]

    def note_no_scale(self) -> None:
        """Note that a disabled scaler left a loss as it is; it may be enabled on other ranks."""
        self.last_loss_scale = lambda: 1.0

    def take_scale(self) -> torch.Tensor | None:
        """Return the scale of the loss that is given to backward now, if it was scaled."""
        scale, self._scaled_by = self._scaled_by, None
        return scale

    @property
    def is_scaled(self) -> bool:
        """Tell whether the loss that is given to backward next was scaled."""
        return self._scaled_by is not None

    def known_scale(self) -> float:
        """Return the loss scale in force, NaN where it is on a device."""
        scale = self._scaled_by
        return float(scale) if scale is not None and scale.device.type == "cpu" else float("nan")

    def loaded(self, what: str, location: str | None) -> None:
        """Note a load_state_dict."""
        self._recorder.window.loads.append(Load(what=what, location=location))

    def gathered(self, outputs: list[Any], tensor: torch.Tensor, location: str | None) -> None:
        """Note an all_gather of a tensor that requires grad; judged at backward, when the list is in its final form.

        The list is held until then, unless it is large, or a forward comes first.
        """
        lists = [outputs, *(some for some, _ in self._lists)]
        size = sum(o.nbytes for some in lists for o in some if isinstance(o, torch.Tensor))
        if len(self._lists) <= _MAX_GATHERS and size <= _GATHERED_BYTES:
            self._lists.append((outputs, Gathered(location=location, shapes=(tuple(tensor.shape),))))

    def drop_gathers(self) -> None:
        """Let go of lists that no backward has followed: in a validation none will, and they may hold their graph."""
        self._lists.clear()

    def close_gathers(self) -> None:
        """Judge which gathers have cut the gradient: those whose own slot was not put back."""
        lists, self._lists = self._lists, []
        for outputs, fact in lists:
            if any(isinstance(o, torch.Tensor) and o.requires_grad for o in outputs):
                continue  # the usual way to keep the local gradient
            self._recorder.window.gathered.append(fact)
            if self._gathers < _MAX_GATHERS:
                self._announce(fact, self._gathers)
                self._gathers += 1
