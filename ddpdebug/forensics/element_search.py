"""The search for the first differing element of a parameter, with its value on each rank.

All ranks copy the parameter after the same optimizer step (agreed a little ahead), tell each other the fingerprints of
its chunks, and then one rank of each opinion sends the first chunk that differs. The values are those of the step at
which the copy was made, which the result states.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.probes.handover import Plans
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.values import raw_bytes

_MAX_CHUNKS = 1024
_MIN_CHUNK = 4096
_MAX_ELEMENTS = 16 << 20
_MAX_VOICES = 4
#: Bits by which two values differ that is called a flip; more of them are two numbers.
_FEW_BITS = 2
#: The bits of an exponent below this one change a value by a factor of 256 at most, as training may.
_LOW_EXPONENT = 4
#: A search that is not over after so many ticks is given up: some rank has not made its copy.
_MAX_TICKS = 2000


@dataclass(slots=True)
class _Copy:
    """A planned copy of a parameter; `made` is set once by the training thread, to (elements or None, step)."""

    optimizer: int
    name: str
    made: tuple[torch.Tensor | None, int] | None = None


@dataclass(slots=True)
class _Search:
    plan: _Copy
    ticks: int = 0
    copy: torch.Tensor | None = None
    taken_at: int = -1
    chunk_size: int = _MIN_CHUNK
    told: bool = False
    chunks: dict[int, list[str]] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)  # at which the ranks have made their copies
    values: dict[int, bytes] = field(default_factory=dict)
    asked: tuple[int, ...] = ()
    chunk: int = -1


class Elements:
    """The element searches of one rank.

    `capture` and `last_look` are called on the training thread and know the plans only; the rest, and all searches,
    belong to the background thread. Where a rank cannot make its copy it says so, and all give up the search.

    Args:
        say: sends a JSON message to all ranks.
        plans: carries the copies to the training thread.
    """

    def __init__(self, rank: int, say: Callable[..., object], plans: Plans | None = None) -> None:
        self.rank = rank
        self._say = say
        self._plans = plans or Plans()
        self._searches: dict[str, _Search] = {}

    @property
    def busy(self) -> bool:
        """Whether a copy was made whose search has not ended."""
        return any(search.plan.made is not None for search in self._searches.values())

    def begin(self, key: str, optimizer: int, name: str, step: int) -> None:
        """Plan a copy of parameter `name` after optimizer step `step`; called alike on all ranks."""
        search = self._searches[key] = _Search(_Copy(optimizer, name))
        self._plans.add(_kind(optimizer), step, search.plan)

    def capture(self, watch: OptimizerWatch, step: int, *, last: bool = False) -> None:
        """Make the copies that are due after this step; with `last` all planned ones, as no further step comes."""
        for plan in self._plans.take(_kind(watch.index), None if last else step):
            elements = None
            try:
                if plan.name in watch.names:
                    parameter = watch.params[watch.names.index(plan.name)].detach()
                    elements = internals.unlisted(parameter.contiguous().view(-1)[:_MAX_ELEMENTS].clone())
            finally:  # also where there is no memory for it: the others wait for an answer
                plan.made = elements, step

    def last_look(self, watch: OptimizerWatch) -> None:
        """Make the planned copies for an optimizer that will not step again."""
        self.capture(watch, watch.step - 1, last=True)

    def miss(self, key: str) -> None:
        """Announce that this rank has no such parameter any more, so that no rank waits for it."""
        self._say("element", key=key, stage="none", data=[])

    def tick(self) -> None:
        """Announce copies made since the last tick."""
        for key, search in tuple(self._searches.items()):
            search.ticks += 1
            if search.ticks > _MAX_TICKS:
                del self._searches[key]
            elif search.plan.made is not None and not search.told:
                search.told = True
                elements, search.taken_at = search.plan.made
                if elements is None:
                    self._say("element", key=key, stage="none", data=[])
                    continue
                search.copy = elements.cpu()
                search.chunk_size = max(_MIN_CHUNK, -(-search.copy.numel() // _MAX_CHUNKS))
                pieces = search.copy.split(search.chunk_size)
                digests = [f"{value:016x}" for value in fingerprint.fingerprints(pieces)]
                self._say("element", key=key, stage="chunks", data=digests, step=search.taken_at)

    def hear(self, rank: int, message: Mapping[str, Any], members: int) -> tuple[str, dict[str, Any]] | None:
        """Handle a message of a rank; return (key, evidence) when a search has ended with a result."""
        key = str(message["key"])
        search = self._searches.get(key)
        if search is None:
            return None
        if message["stage"] == "none":
            del self._searches[key]  # alike on all ranks
            return None
        if message["stage"] == "chunks":
            search.chunks[rank] = [str(digest) for digest in message["data"]]
            search.steps.add(int(message.get("step", search.taken_at)))
            if len(search.chunks) == members:
                self._ask(key, search)
            return None
        search.values[rank] = base64.b64decode(str(message["data"]))
        if set(search.values) < set(search.asked):
            return None
        del self._searches[key]
        return (key, evidence) if (evidence := _compare(search)) else None

    def _ask(self, key: str, search: _Search) -> None:
        columns = zip(*search.chunks.values(), strict=False)
        search.chunk = next((i for i, column in enumerate(columns) if len(set(column)) > 1), -1)
        if search.chunk < 0 or len(search.steps) > 1:  # copies of different steps differ without any fault
            del self._searches[key]
            return
        opinions: dict[str, int] = {}
        for rank in sorted(search.chunks):
            opinions.setdefault(search.chunks[rank][search.chunk], rank)
        search.asked = tuple(sorted(opinions.values())[:_MAX_VOICES])
        if self.rank in search.asked and search.copy is not None:
            piece = search.copy[search.chunk * search.chunk_size : (search.chunk + 1) * search.chunk_size]
            data = base64.b64encode(raw_bytes(piece)).decode()
            self._say("element", key=key, stage="values", data=data)


def _kind(optimizer: int) -> str:
    return f"copy:{optimizer}"


def _compare(search: _Search) -> dict[str, Any] | None:
    if search.copy is None or not search.values:
        return None
    width = search.copy.element_size()
    raw = search.values
    shortest = min(map(len, raw.values()))
    position = next(
        (i for i in range(0, shortest, width) if len({data[i : i + width] for data in raw.values()}) > 1), None
    )
    if position is None:
        return None
    values, patterns = {}, set[int]()
    for rank, data in sorted(raw.items()):
        own = data[position : position + width]
        values[str(rank)] = float(torch.frombuffer(bytearray(own), dtype=torch.uint8).view(search.copy.dtype)[0])
        patterns.add(int.from_bytes(own, sys.byteorder))
    flat = search.chunk * search.chunk_size + position // width
    found = {"flat_index": flat, "values": values, "element_of": search.plan.name, "values_at_step": search.taken_at}
    if len(patterns) == 2 and _is_alone(search, position, width):
        one, other = patterns
        bits = flipped_bits(one, other, search.copy.dtype)
        found |= {"flipped_bits": bits, "dtype": str(search.copy.dtype).removeprefix("torch.")} if bits else {}
    return found


def _is_alone(search: _Search, position: int, width: int) -> bool:
    """Return whether no other element of the parameter differs."""
    chunks = zip(*search.chunks.values(), strict=False)
    rest = {data[:position] + data[position + width :] for data in search.values.values()}
    return len(rest) == 1 and sum(len(set(chunk)) > 1 for chunk in chunks) == 1


def flipped_bits(one: int, other: int, dtype: torch.dtype) -> list[int]:
    """Return the bits in which two bit patterns differ, 0 is the lowest; empty if more than a few differ.

    Steps that came after a flip have changed both values alike, and of a very large one nothing: a high bit of the
    exponent is seen still, the low bits of the mantissa are no evidence any more.
    """
    bits = [bit for bit in range(8 * dtype.itemsize) if (one ^ other) >> bit & 1]
    if len(bits) <= _FEW_BITS or not dtype.is_floating_point:
        return bits if len(bits) <= _FEW_BITS else []
    mantissa = round(-math.log2(torch.finfo(dtype).eps))
    high = [bit for bit in bits if bit >= mantissa]
    return high if len(high) == 1 and mantissa + _LOW_EXPONENT <= high[0] < 8 * dtype.itemsize - 1 else []
