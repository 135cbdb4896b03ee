"""The times of a step's phases on a CUDA device, by events recorded where the host's times are taken.

A host that launches work returns before the device has done it, so its times say little of a device's. Events go into
the current stream at the beginning and the end of each phase, without waiting for it, and the background thread reads
them as it makes the row. What is between the event after the last gradient of a rank's own and the one after backward
is the reduction that nothing hides, and waiting for others. While a CUDA graph is captured nothing is recorded and
nothing is asked, since either would spoil the capture.

Tested with events that are made by hand: nothing of this has run on CUDA yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.devices import captures
from ddpdebug.isolation.guard import CAPTURES, Guard
from ddpdebug.probes import training_events as events
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.gradient_hooks import GradientHooks
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus

#: For which a row waits for its step's events, in seconds, and how often it asks: soon, and then less and less often.
_PATIENCE, _PAUSE, _LONGEST_PAUSE = 2.0, 0.001, 0.05
#: Batches of a step that are timed: an evaluation may ask for any number.
_BATCHES = 64
_DATA = "data_seconds"
_PHASES = (
    *(_DATA, "forward_seconds", "backward_seconds"),
    *("backward_local_seconds", "sync_wait_seconds", "optimizer_seconds"),
)
_COPY, _AWAY = "copy_seconds", "collective_seconds"


class DeviceEvent(Protocol):
    """A `torch.cuda.Event` with timing."""

    def record(self) -> None:
        """Record the event on the current stream."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds from this event to another one."""


class Device:
    """The timing events of one device, used again and again.

    Args:
        make: returns a new event.
        is_capturing: tells whether the current stream of this thread is captured.
    """

    def __init__(self, make: Callable[[], DeviceEvent], is_capturing: Callable[[], bool]) -> None:
        self._make, self._is_capturing = make, is_capturing
        self._free: list[DeviceEvent] = []

    def mark(self) -> DeviceEvent | None:
        """Record an event; None during a capture."""
        if captures.in_progress or self._is_capturing():
            return None
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event

    def wait_for(self, marks: list[DeviceEvent]) -> bool:
        """Return whether the device reaches all events in time; only off the hot path."""
        until, pause, left = time.monotonic() + _PATIENCE, _PAUSE, marks[:]
        while True:
            while left and captures.is_reached(left[-1]):
                left.pop()
            if not left:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def between(self, first: DeviceEvent, second: DeviceEvent) -> float:
        """Return the seconds between two reached events; NaN during a capture."""
        seconds = captures.ask(lambda: first.elapsed_time(second))
        return math.nan if seconds is None else seconds / 1e3

    def take_back(self, marks: list[DeviceEvent]) -> None:
        """Keep reached events for later use: one recorded again before that would give no time."""
        self._free += marks


@dataclass(slots=True)
class _Span:
    """A stretch of the stream; None where a capture came in between."""

    column: str
    first: DeviceEvent | None
    second: DeviceEvent | None = None
    within: str | None = None  # a phase that does not have its time


@dataclass(slots=True)
class DeviceTimes(Part, key="probe:device-times"):
    """The phases of one step on the device; they replace the host's times."""

    device: Device | None = None
    spans: list[_Span] = field(default_factory=list)
    unknown: bool = False  # it runs on a device of which nothing is known

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return the times; NaN if the device does not reach the events within two seconds."""
        device, spans = self.device, self.spans
        if self.unknown:
            return dict.fromkeys((_DATA, "backward_local_seconds", "sync_wait_seconds"), math.nan)
        if device is None or not spans:
            return {}
        marks = list(
            {id(mark): mark for span in spans for mark in (span.first, span.second) if mark is not None}.values()
        )
        if any([span.first is None or span.second is None for span in spans]) or not device.wait_for(marks):
            return dict.fromkeys((*_PHASES, _AWAY, _COPY), math.nan)
        found = dict.fromkeys((*_PHASES, _AWAY), 0.0)
        for span in spans:
            assert span.first is not None
            assert span.second is not None
            seconds = device.between(span.first, span.second)
            found[span.column] = found.get(span.column, 0.0) + seconds
            if span.within is not None:
                found[span.within] -= seconds
                if span.within == "backward_seconds":
                    found["backward_local_seconds"] -= seconds
        device.take_back(marks)
        return found

    def let_go(self) -> None:
        """Drop the events."""
        self.spans = []


class DeviceClock:
    """Records events in the followed thread's steps, from the first step with a model on a CUDA device on.

    Args:
        hooks: see the gradients.
        make: makes the events of the device that a model is on; None where that cannot be timed.
    """

    def __init__(
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        hooks: GradientHooks,
        make: Callable[[torch.device], Device | None],
    ) -> None:
        self._state, self._guard, self._hooks, self._make = state, guard, hooks, make
        self._device: Device | None = None
        self._open: list[_Span] = []
        self._spans: list[_Span] = []
        self._asked: DeviceEvent | None = None  # as the batch was asked for that is to come
        self._last: DeviceEvent | None = None  # after the newest gradient of this backward
        self._arrivals: dict[int, int] = {}  # of gradients in this backward, by DDP
        self._expected: dict[int, int] = {}  # ... in the newest one that has reduced them
        guard.when_cut(self._cut)
        guard.when_off("probe:device-times", self._stop)
        bus.on("probe:device-times", events.BatchAwaited, self._awaited)
        bus.on("probe:device-times", events.BatchDelivered, self._delivered)
        bus.on("probe:device-times", events.ForwardBegan, self._forward_began)
        bus.on("probe:device-times", events.ForwardPrepared, lambda _: self._leave(_COPY))
        bus.on("probe:device-times", events.ForwardEnded, self._forward_ended)
        bus.on("probe:device-times", events.ForwardFailed, self._forward_failed)
        bus.on("probe:device-times", events.BackwardBegan, self._backward_began)
        bus.on("probe:device-times", events.BackwardEnded, self._backward_ended)
        bus.on("probe:device-times", events.StepBegan, self._step_began)
        bus.on("probe:device-times", events.StepEnded, self._step_ended)
        bus.on("probe:device-times", events.StepClosing, self._close)
        # from the beginning: a graph may be captured before the first step
        graph, patch = torch.cuda.CUDAGraph, entries_of(guard).patch
        begins, ends = [(CAPTURES, self._capture_begins)], [(CAPTURES, self._capture_ends)]
        why = "that nothing of ours goes into a CUDA graph, and nobody asks the device, while one is captured"
        patch(graph, "capture_begin", why, before=begins, failed=ends)
        patch(graph, "capture_end", why, after=ends, failed=ends)

    def _begin(self) -> None:
        """Record from here on."""
        self._hooks.tell(self._arrived)
        self._state.clock.tell(self._away)

    def _stop(self) -> None:
        self._hooks.tell(None)
        self._state.clock.tell(None)

    def _capture_begins(self, *_: Any, **__: Any) -> None:
        captures.change(1)
        self._guard.cut()  # of a step that is captured the end is not seen
        self._guard.capturing += 1

    def _capture_ends(self, *_: Any, **__: Any) -> None:
        self._guard.capturing = max(0, self._guard.capturing - 1)
        captures.change(-1)
        self._guard.cut()  # gradients that have arrived meanwhile belong to no backward that is seen

    def release(self) -> None:
        """Forget captures whose end was not seen, as others would wait for it."""
        captures.change(-self._guard.capturing)
        self._guard.capturing = 0

    def _cut(self) -> None:
        self._open, self._spans, self._last, self._asked = [], [], None, None

    # --- phases -------------------------------------------------------------------------------------------------------

    def _enter(self, column: str) -> None:
        assert self._device is not None
        self._open.append(_Span(column, self._device.mark()))

    def _leave(self, column: str) -> None:
        if self._device is None or not self._open or self._open[-1].column != column:
            return
        span = self._open.pop()
        span.second = self._device.mark()
        if self._open and column != _COPY:
            span.within = self._open[-1].column
        self._spans.append(span)

    def _away(self, away: bool) -> None:  # noqa: FBT001 - the one thing that is told
        (self._enter if away else self._leave)(_AWAY)

    def _awaited(self, _: events.BatchAwaited) -> None:
        if self._device is not None and sum(span.column == _DATA for span in self._spans) < _BATCHES:
            self._asked = self._device.mark()

    def _delivered(self, _: events.BatchDelivered) -> None:
        first, self._asked = self._asked, None
        if self._device is not None and first is not None:
            self._spans.append(_Span(_DATA, first, self._device.mark()))

    def _forward_began(self, event: events.ForwardBegan) -> None:
        if self._device is None or not torch.is_grad_enabled():
            return
        away = bool(self._open) and self._open[-1].column == _AWAY  # buffers are broadcast: that began before
        kept = [self._open.pop()] if away else []
        self._enter("forward_seconds")
        self._open += kept
        if not away and event.ddp.device_ids and any([tensor.device.type == "cpu" for tensor in event.tensors()]):
            self._enter(_COPY)

    def _forward_ended(self, _: events.ForwardEnded) -> None:
        if torch.is_grad_enabled():
            self._leave("forward_seconds")

    def _forward_failed(self, _: events.ForwardFailed) -> None:
        inner = [number for number, span in enumerate(self._open) if span.column == "forward_seconds"]
        del self._open[inner[-1] if inner else len(self._open) :]

    def _backward_began(self, _: events.BackwardBegan) -> None:
        if self._device is not None and self._state.in_backward == 1:
            self._arrivals, self._last = {}, None
            self._enter("backward_seconds")

    def _arrived(self, wrapper: Wrapper) -> None:
        """Record the last gradient of a DDP: the one that its reduced backward before had as its last, and any more."""
        number = wrapper.index
        self._arrivals[number] = self._arrivals.get(number, 0) + 1
        if self._arrivals[number] >= self._expected.get(number, math.inf):
            self._guard.run("probe:device-times", self._mark_last)

    def _mark_last(self) -> None:
        assert self._device is not None
        if self._last is None:
            self._last = self._device.mark()
        else:
            self._last.record()

    def _backward_ended(self, _: events.BackwardEnded) -> None:
        if self._state.in_backward != 1 or not self._open or self._open[-1].column != "backward_seconds":
            return
        whole = self._open[-1]
        self._leave("backward_seconds")
        last = whole.second
        reduced = [wrapper.index for wrapper in self._state.wrappers if wrapper.armed and wrapper.arrived]
        if reduced:
            last = self._last if all([number in self._expected for number in reduced]) else None
            self._expected |= {number: self._arrivals.get(number, 0) for number in reduced}
        self._spans += [
            _Span("backward_local_seconds", whole.first, last),
            _Span("sync_wait_seconds", last, whole.second),
        ]

    def _step_began(self, _: events.StepBegan) -> None:
        if self._device is not None and not self._state.in_backward:
            self._enter("optimizer_seconds")

    def _step_ended(self, _: events.StepEnded) -> None:
        if not self._state.in_backward:
            self._leave("optimizer_seconds")

    def _close(self, event: events.StepClosing) -> None:
        if self._device is not None:
            event.record.parts[DeviceTimes] = DeviceTimes(self._device, self._spans)
            self._cut()
        elif torch.cuda.is_initialized() or self._make is not cuda_device:
            on = next(iter([place for module in self._state.models() if (place := _place(module))]), None)
            if on is not None and (device := self._make(on)) is not None:
                self._device = device
                self._begin()
            elif on is not None and on.type == "cuda":  # the host's clock does not tell computing from waiting there
                event.record.parts[DeviceTimes] = DeviceTimes(unknown=True)


def _place(module: torch.nn.Module) -> torch.device | None:
    parameter = internals.first_parameter(module)
    return None if parameter is None else parameter.device


def cuda_device(on: torch.device) -> Device | None:
    """Return the current CUDA device; None if the model is on another one, as an event would go to the wrong stream.

    A rank that has not called `torch.cuda.set_device` would have a context on device 0 for it.
    """
    if on.type != "cuda" or on.index != torch.cuda.current_device():
        return None
    return Device(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.is_current_stream_capturing)
