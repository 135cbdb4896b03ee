"""Search for non-finite parameters after the last steps, if none of these steps was watched.

Otherwise a later step that is watched finds them. They are read when a run, its last process group or an optimizer
ends; what is read on a device is waited for at the end of the run or of the group alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ddpdebug.devices import failure, keep
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import async_copy as device, ranges
from ddpdebug.probes.nonfinite import MAX_NAMES, Numerics
from ddpdebug.probes.nonfinite_notes import Judgement
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import SinceLastStep, StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, GroupEnds, OptimizerEnded
from ddpdebug.schema.details import NonfiniteParameters, Numerics as Detail
from ddpdebug.schema.row import Flag

#: What is read at the end on the CPU, at 30 GB/s: larger parameters are not looked at.
_MOST_BYTES = 8 << 30


class EndNumbers:
    """The final check of one rank's parameters; non-finite ones make a row of this rank alone for the last step.

    Args:
        numerics: knows what was found before.
        hand_over: takes the record.
    """

    def __init__(
        self, bus: Bus, state: StepState, guard: Guard, numerics: Numerics, hand_over: Callable[[StepRecord], None]
    ) -> None:
        self._state, self._numerics, self._hand_over, self._run = state, numerics, hand_over, guard.run
        self._begun: dict[int, int] = {}  # optimizer -> number of its steps when it was looked at
        self._waiting: list[tuple[StepRecord, int, Sequence[str], device.LaterFloats]] = []
        bus.on("probe:numerics-end", OptimizerEnded, lambda event: self._begin(event.watch))
        bus.on("probe:numerics-end", GroupEnds, lambda _: self.look())

    def look(self) -> None:
        """Check the parameters of all optimizers, whose steps are over."""
        for watch in self._state.watches:
            self._run("probe:numerics-end", self._begin, watch)
        waiting, self._waiting = self._waiting, []
        for record, first, names, read in waiting:
            if failure.failed:
                keep(waiting)
                return
            values = read()
            spans = zip(names, values[::2], values[1::2], strict=True)
            bad = [name for name, low, high in spans if not (math.isfinite(low) and math.isfinite(high))]
            if bad:
                record.flags |= Flag.PARAMS_NONFINITE
                parameters = NonfiniteParameters(before=(*bad[:MAX_NAMES],), unwatched_since=first)
                record.parts[Judgement].detail = Detail(parameters=parameters)
                self._hand_over(record)

    def _begin(self, watch: OptimizerWatch) -> None:
        """Read what the last step of an optimizer has left, unless that step has a row, without waiting."""
        last = watch.step - 1
        if failure.failed or last <= watch.told or self._begun.get(watch.index) == last:
            return
        self._begun[watch.index] = last
        params = watch.readable()
        large = watch.on_cpu and sum([p.nbytes for p in params]) > _MOST_BYTES
        if large or not self._numerics.may_be_new(watch):
            return
        looks = [(name, seen) for name, p in zip(watch.names, params, strict=True) if (seen := ranges.look(p))]
        record = StepRecord(watch.index, last, Flag.ALONE, SinceLastStep(number=last), names=watch.names)
        record.fields["overhead_seconds"] = 0.0
        read = device.numbers([number for _, seen in looks for number in seen])
        self._waiting.append((record, watch.told + 1, [name for name, _ in looks], read))
