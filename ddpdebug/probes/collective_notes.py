"""Notes of communication calls, which the black box of a rank keeps to explain a hang.

A call is noted as it begins, a few microseconds each: the operation, the group and the call's number in it, shapes, the
rank that it names, the user's line, how far the rank was. What DDP issues from C++ is noted by what leads to it: the
forward that broadcasts buffers, the backward that reduces. A call that torch makes from another one (the tensors of
`all_gather_object`) is noted as well, under numbers of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.hand_averaging import HandAveraging
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import (
    BackwardBegan,
    BatchDelivered,
    Bus,
    CollectiveBegan,
    EpochEnded,
    ForwardBegan,
)
from ddpdebug.schema.progress import BUFFERS, DATA_ENDED, REDUCTIONS, Noted, note_of

#: Notes that are kept in memory.
_KEPT = 256
_MOST_SHAPES, _MOST_KNOWN = 8, 1024
_MESSAGES = frozenset({"isend", "irecv"})
#: What the recorder counts for a `monitored_barrier`, on each rank.
_OF_BARRIER = 2
#: What no group counts: those around messages, and what meets in the store.
_UNCOUNTED = frozenset(
    {
        "batch_isend_irecv",
        "destroy_process_group",
        "new_group",
        "recv",
        "recv_object_list",
        "send",
        "send_object_list",
    }
)


class _Numbers:
    """The collectives of one group by the numbers that torch's recorder has, which are the same on all ranks.

    Gloo's own count, which is what a group can be asked for at any time, has messages in it, and of a
    `monitored_barrier` those that it is made of: more of them on rank 0. NCCL's has neither. Measured on 2.13.

    Args:
        counts_messages: the group's own count has messages in it.
    """

    __slots__ = ("_barrier", "_counts_messages", "_messages", "_sent", "own")

    def __init__(self, *, counts_messages: bool) -> None:
        self._counts_messages = counts_messages
        self._sent = 0  # what the group has counted beyond the recorder
        self._messages: deque[tuple[int, int]] = deque(maxlen=_KEPT)  # the newest of it: the count after, and how many
        self._barrier: int | None = None  # the count before a barrier whose end has not been seen
        self.own = 0  # calls of a group that counts nothing

    def message(self, count: int) -> None:
        if self._counts_messages:
            self._add(count + 1, 1)

    def barrier(self, count: int) -> None:
        if self._counts_messages:
            self._barrier = count

    def _add(self, count: int, many: int) -> None:
        self._sent += many
        self._messages.append((count, many))

    def at(self, count: int) -> int:
        """Return the number of the newest collective as the next call begins."""
        before = self._barrier
        if before is not None:
            self._barrier = None
            self._add(count, max(0, count - before - _OF_BARRIER))
        return self.of(count) if self._sent else count

    def of(self, count: int) -> int:
        """Return the number of the newest collective at a count of the group's."""
        if self._barrier is not None:
            count = min(count, self._barrier + _OF_BARRIER)
        if not self._sent:
            return count
        return count - self._sent + sum(many for at, many in tuple(self._messages) if at > count)


class CollectiveNotes:
    """The notes of communication calls in one process."""

    def __init__(self, bus: Bus, state: StepState, guard: Guard) -> None:
        self._bus, self._state, self._entries = bus, state, entries_of(guard)
        self._write: Callable[[str], None] | None = None
        self._kept: deque[str] = deque(maxlen=_KEPT)
        self._numbers: dict[str, _Numbers] = {}
        self._shapes: dict[tuple[Any, Any], tuple[str]] = {}
        self._batches = 0
        self._averaging = HandAveraging(bus, state)
        self._is_placed = False
        bus.on("probe:collectives", ForwardBegan, lambda event: self.forward(event.ddp))
        bus.on("probe:collectives", BackwardBegan, self._backward)
        bus.on("probe:collectives", BatchDelivered, self._delivered)
        bus.on("probe:collectives", EpochEnded, self._data_ended)

    def install(self) -> None:
        """Observe the functions of `torch.distributed` from now on, once there are several ranks."""
        if self._is_placed or internals.anything_compiled():
            return
        self._is_placed = True
        what = "the code of the functions of torch.distributed"
        why = "which collectives a rank has issued, and where; the functions stay the same objects"
        timed = ("probe:own-times", self._begins), ("probe:own-times", self._state.clock.go_on)
        self._entries.in_code("probe:collectives", what, internals.look_at_collectives, self.issued, why, *timed)

    def write_to(self, write: Callable[[str], None]) -> None:
        """Set the function that writes notes; kept notes are written first."""
        for text in tuple(self._kept):
            write(text)
        self._write = write

    # --- what is noted ------------------------------------------------------------------------------------------------

    def issued(
        self,
        operation: str,
        tensors: Any,
        root: Any,
        group_root: Any,
        group: Any,
        frame: FrameType | None = None,
    ) -> None:
        """Note a communication call that begins; `frame` is that of its function."""
        self._averaging.carries(operation, tensors)
        if "send" in operation or "recv" in operation:
            self._state.messages = self._state.next_step()
        if operation in _UNCOUNTED:
            peer = root if isinstance(root, int) else None
            self._note(operation, "", 0, self._texts(tensors), peer, frame)
            return
        found = internals.own_group(group)
        if found is None:
            return
        if root is None and group_root is not None:
            root = dist.get_global_rank(found, group_root)
        name, count, numbers = self._of_group(found)
        number = numbers.at(count)
        if operation in _MESSAGES:
            numbers.message(count)
            number = -1
        elif operation == "monitored_barrier":
            numbers.barrier(count)
            number = -1
        else:
            numbers.own += 1
        self._note(operation, name, number + 1, self._texts(tensors), root, frame)

    def _begins(self) -> None:
        """Let the clock stand still in the thread that trains, until the function ends."""
        if self._entries.threads.watched() == threading.get_ident():
            self._bus.emit(CollectiveBegan())
            self._state.clock.stop()

    def _backward(self, _: BackwardBegan) -> None:
        for wrapper in self._state.wrappers:
            if wrapper.armed and (ddp := wrapper.ref()) is not None:
                self._of_ddp(REDUCTIONS, ddp)

    def forward(self, ddp: DistributedDataParallel) -> None:
        """Note the buffer broadcast of a forward, in watched and unwatched steps."""
        if internals.syncs_buffers_now(ddp):
            self._of_ddp(BUFFERS, ddp)

    def backward(self) -> None:
        """Note the gradient reduction of a backward in an unwatched step."""
        if not self._is_placed:  # nobody else waits for this rank
            return
        for wrapper in self._state.wrappers:
            if (ddp := wrapper.ref()) is not None and internals.reduces_next(ddp):
                self._of_ddp(REDUCTIONS, ddp)

    def _of_ddp(self, operation: str, ddp: DistributedDataParallel) -> None:
        name, count, numbers = self._of_group(ddp.process_group)
        self._note(operation, name, numbers.at(count) + 1, (), None)

    def _delivered(self, _: BatchDelivered) -> None:
        self._batches += 1

    def _data_ended(self, event: EpochEnded) -> None:
        if not event.failed:
            self._note(DATA_ENDED, "", 0, (), None)

    def _of_group(self, group: Any) -> tuple[str, int, _Numbers]:
        name = internals.name_of(group)
        numbers = self._numbers.get(name)
        if numbers is None:
            numbers = self._numbers[name] = _Numbers(counts_messages=internals.counts_messages(group))
        count = internals.sequence_number(group)
        return name, numbers.own if count is None else count, numbers

    def _note(
        self,
        operation: str,
        group: str,
        number: int,
        shapes: tuple[str, ...],
        root: int | None,
        frame: FrameType | None = None,
    ) -> None:
        step, location = self._state.next_step(), user_location(frame)
        text = note_of(operation, group, number, root, step, self._batches, location, shapes)
        self._kept.append(text)
        if self._write is not None:
            self._write(text)

    def _texts(self, given: Any) -> tuple[str, ...]:
        if isinstance(given, torch.Tensor):
            return self._text(given)
        if isinstance(given, list | tuple):
            return tuple([text for one in given[:_MOST_SHAPES] for text in self._text(one)])
        return ()

    def _text(self, given: Any) -> tuple[str]:
        if not isinstance(given, torch.Tensor):
            return (str(given) if isinstance(given, int) else type(given).__name__,)
        key = given.dtype, given.shape
        known = self._shapes.get(key)
        if known is None:
            known = (f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}",)
            if len(self._shapes) < _MOST_KNOWN:
                self._shapes[key] = known
        return known

    # --- what they are asked for, by the background thread ------------------------------------------------------------

    def kept(self) -> tuple[Noted, ...]:
        """Return the newest notes, oldest first."""
        return tuple([noted for text in tuple(self._kept) if (noted := Noted.read(text)) is not None])

    def number(self, group: str, count: int) -> int:
        """Return the number of the newest collective of a group, from the group's count."""
        numbers = self._numbers.get(group)
        return count if numbers is None else numbers.of(count)
