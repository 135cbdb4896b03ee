"""Frozen parameters that their optimizer changes nevertheless, by a gradient that was left in them."""

from __future__ import annotations

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.gradients import GradientSums
from ddpdebug.probes.training_events import StepClosing, StepOpened


class FrozenMoves:
    """The probe of frozen parameters with a gradient, before and after a checked step.

    Those whose gradient has come since the last step are left out: some are frozen for a while (GANs) and step with
    what they got before.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, torch.Tensor]] = []
        self._before: list[int | None] = []

    def before(self, event: StepOpened) -> None:
        """Record the frozen parameters with a gradient before a step."""
        watch, record = event.watch, event.record
        self._held = []
        if record.checked and watch.wrappers:
            came = record.since.parts[GradientSums].local
            rows = zip(watch.names, watch.params, strict=True)
            self._held = [(n, p) for n, p in rows if not p.requires_grad and p.grad is not None and id(p) not in came]
            self._before = signs([p for _, p in self._held])

    def after(self, _: StepClosing) -> tuple[str, ...]:
        """Return the frozen parameters that `optimizer.step()` has changed."""
        held, self._held = self._held, []
        if not held:
            return ()
        now = signs([p for _, p in held])
        return tuple([name for (name, _), old, new in zip(held, self._before, now, strict=True) if old != new])


def signs(params: list[torch.Tensor]) -> list[int | None]:
    """Return a value per parameter that changes with it: on the CPU of sampled bytes, elsewhere the count of writes."""
    glances = device.glances(params)
    return [internals.version_of(p) for p in params] if glances is None else [*glances()]
