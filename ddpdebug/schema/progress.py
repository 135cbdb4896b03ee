"""The progress and the waits of a rank: messages between ranks while one of them waits. Torch-free.

Times are seconds. Those of `RankProgress.time` are of the monotonic clock of its host, and can be compared there only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ddpdebug.schema.wire import ABSENT, Struct, as_text

#: Operations whose ranks must agree about shape and type; in others each rank may give another part.
_ALIKE = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "broadcast",
        "reduce",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    }
)
#: What DDP makes of the ranks' calls, as it is noted: a broadcast of its buffers, and the reductions of a backward.
BUFFERS, REDUCTIONS = "DDP's broadcast of buffers", "DDP's reduction of gradients"
#: What is noted where a loader's iterator has come to its end.
DATA_ENDED = "the loader has no more batches"
#: Of a path so much is noted, and in so many fields a line.
_LOCATION, _FIELDS = 100, 7
#: So many of the newest collectives are told.
MOST_RECENT = 16
_MOST_RANKS = 1 << 20


def spans_of(ranks: Iterable[int]) -> str:
    """Return ranks as a short text, also for one rank of each host: "0-1023", "3,8-120:8"."""
    return _spans(tuple(ranks))


@lru_cache(maxsize=64)  # of the groups of a job: a thousand ranks tell of them twenty times in a look
def _spans(ranks: tuple[int, ...]) -> str:
    runs: list[list[int]] = []  # first, last, distance
    for rank in sorted(ranks):
        if runs and (runs[-1][0] == runs[-1][1] or rank - runs[-1][1] == runs[-1][2]):
            runs[-1][1:] = rank, rank - runs[-1][1]
        else:
            runs.append([rank, rank, 1])
    spans = []
    for low, high, distance in runs:
        if low == high or high == low + distance > low + 1:
            spans += [str(one) for one in dict.fromkeys((low, high))]
        else:
            spans.append(f"{low}-{high}" + (f":{distance}" if distance > 1 else ""))
    return ",".join(spans)


@lru_cache(maxsize=64)
def ranks_in(text: str) -> tuple[int, ...]:
    """Parse the text of `spans_of` into a tuple of ranks.

    Raises:
        ValueError: it is none.
    """
    found: list[int] = []
    for span in text.split(",") if text else ():
        ends, _, distance = span.partition(":")
        low, _, high = ends.partition("-")
        last = int(high or low)
        if max(last, len(found)) > _MOST_RANKS:
            raise ValueError("these are too many ranks")
        found += range(int(low), last + 1, int(distance or 1))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Struct):
    """A collective, or a point-to-point message, as a rank issued it."""

    group: str  # name of the process group, the same on all ranks
    number: int  # among the collectives of its group, from 1
    operation: str  # "all_reduce"
    shapes: tuple[str, ...] = ()  # of what it is given: "float32 [4, 8]"
    location: str | None = field(default=None, metadata=ABSENT)  # the user's line that made it
    root: int | None = field(default=None, metadata=ABSENT)  # the rank that it names, of the whole job
    ranks: tuple[int, ...] = field(default=(), metadata=as_text(spans_of, ranks_in))  # that take part
    point_to_point: bool = False
    is_done: bool = False  # has completed on the rank

    def differs(self, other: Call) -> str | None:
        """Return the property in which two ranks' calls with the same number wrongly differ; None if they agree."""
        if self.operation != other.operation:
            return "operation"
        if self.root is not None and other.root is not None and self.root != other.root:
            return "root"
        if self.operation in _ALIKE and self.shapes and other.shapes and self.shapes != other.shapes:
            types = [[shape.partition(" ")[0] for shape in call.shapes] for call in (self, other)]
            if {*types[0]} != {*types[1]}:
                return "dtype"
            sizes = [[_elements(shape) for shape in call.shapes] for call in (self, other)]
            return "shape" if sizes[0] != sizes[1] else None  # [] and [1] are the same to torch
        return None

    def words(self, among: str = "") -> str:
        """Return the call in words.

        Args:
            among: who takes part, where that is to be said.
        """
        shapes = " ".join(self.shapes[:3]) + (" ..." if len(self.shapes) > 3 else "")
        root = "" if self.root is None else f" root {self.root}"
        number = f" #{self.number}" if self.number > 0 else ""
        where = f" at {self.location}" if self.location else ""
        return f"{self.operation}{number}{root}{' of ' + shapes if shapes else ''}{among and ' among ' + among}{where}"


def _elements(shape: str) -> int | str:
    """Return the number of elements of "float32 [4, 8]"; what is no such text, as it is."""
    _, bracket, sizes = shape.partition(" [")
    try:
        return math.prod(int(size) for size in sizes.rstrip("]").split(",") if size.strip()) if bracket else shape
    except ValueError:
        return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress(Struct):
    """The progress of a rank when its thread last observed its own process."""

    rank: int
    pid: int = 0
    host: str = ""  # what its clock and its process number belong to
    time: float = 0.0
    step: int = 0  # that it is heading for
    phase: str = ""  # "data", "forward", "backward", "optimizer", "collective" or "script"
    place: str | None = None  # the innermost of the user's lines, file:line
    function: str = ""
    does: str = ""  # that line's call: "lock.acquire()"
    kind: str = ""  # what it blocks in, see `progress/frames.py`
    same: float = 0.0  # for so long the training thread has been at that place
    still: float = 0.0  # for so long nothing has moved in the process: frames, processor time, disk, batches
    waits: tuple[Call, ...] = ()  # entered and not completed, while the thread does not move
    entered: Mapping[str, int] = field(default_factory=dict)  # group -> collectives
    recent: tuple[Call, ...] = ()  # the newest of all groups, oldest first; only where it has waited for a while
    workers: str = ""  # state of a loader's workers, in words
    kernel: str = ""  # what the kernel shows of the thread, in words
    stack: tuple[str, ...] = ()  # innermost first, "file:line (function)"; the user's and where these lead to
    ended: str = ""  # why it has left, where it has; by then `entered` is final where it has left in order

    @property
    def waiting(self) -> bool:
        """Whether the rank waits for other ranks."""
        return bool(self.waits)


def note_of(  # noqa: PLR0913, PLR0917 - its fields
    operation: str,
    group: str,
    number: int,
    root: int | None,
    step: int,
    batches: int,
    location: str | None,
    shapes: tuple[str, ...],
) -> str:
    """Return the line of a call for `Noted.read`. Made for each call, so it is a plain function."""
    named = "" if root is None else root
    place = "" if location is None else location[-_LOCATION:]
    about = f"{operation}\t{group}\t{number}\t{named}\t{step}\t{batches}\t{place}"
    return about + "\t" + "\t".join(shapes) if shapes else about


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A line of a rank's black box: a call, or another event that matters after the rank's end.

    Args:
        call: its `number` is 0 where the group does not count it: messages, new groups, the end of the data.
        step: that the rank was heading for, and `batches` that its loaders had delivered so far.
    """

    call: Call
    step: int
    batches: int

    @classmethod
    def read(cls, text: str) -> Noted | None:
        """Parse a line of a black box; None if it is damaged."""
        parts = text.split("\t")
        if len(parts) < _FIELDS:
            return None
        operation, group, number, root, step, batches, location, *shapes = parts
        try:
            call = Call(
                group=group,
                number=int(number),
                operation=operation,
                shapes=tuple([shape for shape in shapes if shape]),
                location=location or None,
                root=int(root) if root else None,
            )
            return cls(call=call, step=int(step), batches=int(batches))
        except ValueError:
            return None

    def words(self) -> str:
        """Return the call and its time in words."""
        return f"{self.call.words()}, step {self.step}, after {self.batches} batches"
