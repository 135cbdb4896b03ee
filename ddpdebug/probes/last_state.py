"""The state after the last step: read in full when a run ends, as no later step would check it.

Nobody knows which step is the last one, and between it and the end a script may rewrite the model on purpose: an
average or the best weights on rank 0, 16 bits for an export. Every step therefore leaves a mark: where each parameter's
memory lies, how often it was written in place, and a spot of its contents, which `.data` cannot hide. Where the mark
still holds at the end, the contents are those that the step has left; otherwise this rank says that it cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.loop_calls import StepCalls
from ddpdebug.probes.optimizers import Mark, OptimizerWatch
from ddpdebug.probes.record import SinceLastStep, StepRecord
from ddpdebug.probes.step_digests import ParameterDigests, StateDigests
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, ForwardBegan, GroupEnds, OptimizerEnded, Paused, StepClosed, StepPassed
from ddpdebug.schema.row import Flag

#: So many parameters' contents are looked at in every step, evenly spread over the table: what rewrites a model on
#: purpose rewrites most of it.
_SPOTS = 64
#: On a device each is a launch, of which a step can bear few.
_SPOTS_ON_DEVICE = 8
#: ... and in steps that are not watched.
_FEW = 8
#: What is read at the end on the CPU, at 4 to 30 GB/s: more is not judged. The state is left out first.
_MOST_BYTES = 8 << 30
#: Optimizers that come and go in every step are looked at no longer when that has taken so many seconds, and this share
#: of the time since the first step.
_MOST_SECONDS, _MOST_SHARE = 1.0, 0.01
#: The share of the time that looks at pauses may take: an epoch's end, an evaluation, a load.
_PAUSE_SHARE = 0.002
#: Of a step's flags, what holds for the state that it leaves.
_KEPT = (
    *(Flag.NO_DDP, Flag.IN_JOIN, Flag.LOCAL_ONLY, Flag.SHARDED_STATE, Flag.BYPASS, Flag.UNSYNCED_BACKWARD),
    *(Flag.CUSTOM_REDUCTION, Flag.LOSSY_REDUCTION, Flag.HALF_REDUCTION, Flag.BUFFERS_NOT_BROADCAST),
)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class LastState:
    """Marks steps, and reads the state after the last one.

    Args:
        hand_over: takes the finished record.
        due: tells for (optimizer, step) whether the sampled tier runs.
    """

    def __init__(
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        hand_over: Callable[[StepRecord], None],
        due: Callable[[int, int], bool],
    ) -> None:
        self._state, self._run, self._hand_over, self._due = state, guard.run, hand_over, due
        self._closed = False
        self._chosen: dict[int, tuple[tuple[int, ...], list[int] | None]] = {}  # by index of the optimizer
        self._began = self._seconds = 0.0
        self._kept, self._flags = Flag(0), dict[int, Flag]()  # the latter by optimizer, as of the newest mark
        for flag in _KEPT:
            self._kept |= flag
        bus.on("probe:last-state", StepClosed, self._step_closed)
        bus.on("probe:last-state", StepPassed, self._step_passed)
        bus.on("probe:last-state", ForwardBegan, self._forward_begins)
        bus.on("probe:last-state", Paused, lambda _: self.pause())
        bus.on("probe:last-state", GroupEnds, lambda _: self.look_back())
        bus.on("probe:last-state", OptimizerEnded, lambda event: self.look_back(event.watch))

    def close(self) -> None:
        """Stop handing over records."""
        self._closed = True

    def _step_closed(self, event: StepClosed) -> None:
        if self._state.world > 1:
            self.mark(event.watch, event.record)

    def _step_passed(self, event: StepPassed) -> None:
        """Mark a few parameters after a step that is not watched."""
        watch, flags = event.watch, self._flags.get(event.watch.index)
        watch.mark = None
        if self._state.world > 1 and flags is not None and (choice := self._choice(watch)) is not None:
            few = tuple(choice[:: max(1, len(choice) // _FEW)])
            params = [watch.params[i] for i in few]
            spots = fingerprint.spots(params) if watch.on_cpu else 0  # each is a launch on a device
            watch.mark = Mark(event.step, flags, watch.key, internals.places_of(params), spots, few)

    def _forward_begins(self, _: ForwardBegan) -> None:
        if not torch.is_grad_enabled():
            self.pause()

    def look_back(self, *watches: OptimizerWatch) -> None:
        """Hand over the state after the last steps, of all optimizers or of the named ones: they may step no more."""
        for watch in watches or self._state.watches:
            self._run("probe:last-state", self.look, watch, bool(self._state.since.parts[StepCalls].loads))

    def pause(self) -> None:
        """Read the state at a pause of training, unless the next step is checked: the script may rewrite the model."""
        for watch in self._state.watches:
            if watch.mark is not None and not self._due(watch.index, watch.step):
                self.glance_back(watch)

    def mark(self, watch: OptimizerWatch, record: StepRecord) -> None:
        """Mark the state after the step that has just ended; called after every step."""
        self._began = self._began or time.perf_counter()
        watch.mark = None
        if self._choice(watch) is not None:
            places = internals.places_of(watch.params)
            flags = self._flags[watch.index] = record.flags & self._kept
            watch.mark = Mark(record.step, flags, watch.key, places, self._spots(watch))

    def look(self, watch: OptimizerWatch, loaded: bool) -> None:  # noqa: FBT001 - passed on by the guard
        """Hand over the fingerprints of the state after the last step, once, or that they are not known any more.

        Args:
            loaded: a state was loaded since the step, so that the optimizer's need not be the step's.
        """
        mark, watch.mark = watch.mark, None
        if mark is not None and not self._closed and not self._dear(_MOST_SECONDS, _MOST_SHARE):
            self._look(watch, mark, state=not loaded)

    def glance_back(self, watch: OptimizerWatch) -> None:
        """Hand over the fingerprints of the parameters where training pauses, if that costs next to nothing."""
        mark = watch.mark
        if mark is None or self._closed or self._dear(0.0, _PAUSE_SHARE):
            return
        if self._stands(watch, mark):  # what was swapped may be swapped back
            watch.mark = None
            self._look(watch, mark, state=False)

    def _look(self, watch: OptimizerWatch, mark: Mark, *, state: bool) -> None:
        started = time.perf_counter()
        record = StepRecord(watch.index, mark.step, mark.flags | Flag.LAST_STATE, SinceLastStep(), checked=True)
        record.fields["overhead_seconds"] = 0.0
        record.names, record.owned = watch.names, watch.owned
        record.ids, record.slots = [id(p) for p in watch.params], watch.slots
        if self._stands(watch, mark):
            self._read(watch, record, mark, state=state)
        self._seconds += time.perf_counter() - started
        if not self._closed:
            self._hand_over(record)

    def _stands(self, watch: OptimizerWatch, mark: Mark) -> bool:
        """Return whether nothing has rewritten the parameters, as far as that is known without waiting for a device."""
        if mark.key != watch.key:
            return False
        if mark.of is not None:
            few = [watch.params[i] for i in mark.of]
            alike = mark.places == internals.places_of(few)
            return bool(alike and (not watch.on_cpu or mark.spots == fingerprint.spots(few)))
        if mark.places != internals.places_of(watch.params):
            return False
        return not isinstance(mark.spots, int) or bool(self._spots(watch) == mark.spots)

    def _spots(self, watch: OptimizerWatch) -> int | torch.Tensor:
        return _spots([watch.params[i] for i in self._choice(watch) or ()])

    def _read(self, watch: OptimizerWatch, record: StepRecord, mark: Mark, *, state: bool) -> None:
        size = _bytes(watch.params)
        if watch.on_cpu and size > _MOST_BYTES:
            return
        parameters = record.parts[ParameterDigests]
        if isinstance(mark.spots, torch.Tensor) and isinstance(now := self._spots(watch), torch.Tensor):
            spots = device.digests([now, mark.spots])  # waiting for a device is for the background thread
            parameters.holds = lambda: len(set(spots())) == 1
        parameters.after = device.digests(watch.params)
        if not (state and watch.optimizers()):
            return
        keys, tensors, plain = watch.state(whole=True)
        if not watch.on_cpu or size + _bytes(tensors) <= _MOST_BYTES:
            digests = device.digests(tensors)
            record.parts[StateDigests] = StateDigests(keys, digests, plain, holds=parameters.holds)

    def _choice(self, watch: OptimizerWatch) -> list[int] | None:
        """Return which parameters' contents are looked at; None where no mark can be set."""
        known = self._chosen.get(watch.index)
        if known is None or known[0] != watch.key:
            known = self._chosen[watch.index] = (watch.key, _choose(watch))
        return known[1]

    def _dear(self, seconds: float, share: float) -> bool:
        return self._seconds > max(seconds, share * (time.perf_counter() - self._began))


def _choose(watch: OptimizerWatch) -> list[int] | None:
    params = watch.params
    devices = {p.device for p in params}
    plain = all([type(p) in _PLAIN and p.layout is torch.strided for p in params])
    if not plain or len(devices) != 1 or not devices.isdisjoint({torch.device("meta")}):
        return None
    wanted = [i for i, p in enumerate(params) if p.numel() and (watch.on_cpu or p.is_contiguous())]
    count = min(len(wanted), _SPOTS if watch.on_cpu else _SPOTS_ON_DEVICE)
    return [wanted[i * (len(wanted) - 1) // max(1, count - 1)] for i in range(count)] or None


def _spots(tensors: Sequence[torch.Tensor]) -> int | torch.Tensor:
    if all([t.device.type == "cpu" for t in tensors]):
        return fingerprint.spots(tensors)
    return spots_on_device(tensors)


def spots_on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return some bytes from the middle of each contiguous tensor, on its device, without waiting for it."""
    pieces = []
    with torch.no_grad():
        for tensor in tensors:
            flat, count = tensor.detach().view(-1), fingerprint.SPOT_BYTES
            start = max(0, (len(flat) - count) // 2)
            pieces.append(flat[start : start + count].view(torch.uint8))
        return internals.unlisted(torch.cat(pieces))


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
