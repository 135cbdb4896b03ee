"""Which element of a parameter differs, and what it is on each rank.

All ranks copy the parameter after the same optimizer step (agreed a little ahead), tell each other the fingerprints of
its chunks, and then one rank of each opinion sends the first chunk that differs. The values are those of the step at
which the copy was made, which the result states.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpdebug import fingerprint
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.values import raw_bytes

_MAX_CHUNKS = 1024
_MIN_CHUNK = 4096
_MAX_ELEMENTS = 16 << 20
_MAX_VOICES = 4


@dataclass(slots=True)
class _Hunt:
    optimizer: int
    name: str
    step: int
    copy: torch.Tensor | None = None
    taken_at: int = -1
    chunk_size: int = _MIN_CHUNK
    told: bool = False
    chunks: dict[int, list[str]] = field(default_factory=dict)
    values: dict[int, bytes] = field(default_factory=dict)
    asked: tuple[int, ...] = ()
    chunk: int = -1


class Elements:
    """Runs the hunts of one rank. `capture` is called on the training thread, the rest in the background thread.

    Args:
        say: sends a JSON message to all ranks.
    """

    def __init__(self, rank: int, say: Callable[..., None]) -> None:
        self.rank = rank
        self._say = say
        self._hunts: dict[str, _Hunt] = {}

    @property
    def busy(self) -> bool:
        """Tell whether a copy has been made whose result is not known yet."""
        return any(hunt.copy is not None for hunt in self._hunts.values())

    def begin(self, key: str, optimizer: int, name: str, step: int) -> None:
        """Plan a copy of parameter `name` after optimizer step `step`; called alike on all ranks."""
        self._hunts[key] = _Hunt(optimizer, name, step)

    def capture(self, watch: OptimizerWatch, step: int, *, last: bool = False) -> None:
        """Copy what is due after this step; `last` copies everything planned, because no further step comes."""
        for hunt in self._hunts.values():
            if hunt.copy is not None or hunt.optimizer != watch.index or (step < hunt.step and not last):
                continue
            if hunt.name in watch.names:
                parameter = watch.params[watch.names.index(hunt.name)].detach()
                hunt.copy = parameter.contiguous().view(-1)[:_MAX_ELEMENTS].clone()
                hunt.taken_at = step

    def last_look(self, watch: OptimizerWatch) -> None:
        """Copy what is planned for an optimizer that will not step again."""
        self.capture(watch, watch.step - 1, last=True)

    def miss(self, key: str) -> None:
        """Tell the others that this rank has no such parameter any more, so that nobody waits for it."""
        self._say("element", key=key, stage="chunks", data=[])

    def tick(self) -> None:
        """Tell the others about copies made since the last tick."""
        for key, hunt in self._hunts.items():
            if hunt.copy is not None and not hunt.told:
                hunt.told = True
                hunt.copy = hunt.copy.cpu()
                hunt.chunk_size = max(_MIN_CHUNK, -(-hunt.copy.numel() // _MAX_CHUNKS))
                pieces = hunt.copy.split(hunt.chunk_size)
                digests = [f"{value:016x}" for value in fingerprint.fingerprints(pieces)]
                self._say("element", key=key, stage="chunks", data=digests)

    def hear(self, rank: int, message: Mapping[str, Any], members: int) -> tuple[str, dict[str, Any]] | None:
        """Take a message; return (key, evidence) when a hunt has ended with a result."""
        key = str(message["key"])
        hunt = self._hunts.get(key)
        if hunt is None:
            return None
        if message["stage"] == "chunks":
            hunt.chunks[rank] = [str(digest) for digest in message["data"]]
            if len(hunt.chunks) == members:
                self._ask(key, hunt)
            return None
        hunt.values[rank] = base64.b64decode(str(message["data"]))
        if set(hunt.values) < set(hunt.asked):
            return None
        del self._hunts[key]
        return (key, evidence) if (evidence := _compare(hunt)) else None

    def _ask(self, key: str, hunt: _Hunt) -> None:
        columns = zip(*hunt.chunks.values(), strict=False)
        hunt.chunk = next((i for i, column in enumerate(columns) if len(set(column)) > 1), -1)
        if hunt.chunk < 0:
            del self._hunts[key]
            return
        opinions: dict[str, int] = {}
        for rank in sorted(hunt.chunks):
            opinions.setdefault(hunt.chunks[rank][hunt.chunk], rank)
        hunt.asked = tuple(sorted(opinions.values())[:_MAX_VOICES])
        if self.rank in hunt.asked and hunt.copy is not None:
            piece = hunt.copy[hunt.chunk * hunt.chunk_size : (hunt.chunk + 1) * hunt.chunk_size]
            data = base64.b64encode(raw_bytes(piece)).decode()
            self._say("element", key=key, stage="values", data=data)


def _compare(hunt: _Hunt) -> dict[str, Any] | None:
    if hunt.copy is None or not hunt.values:
        return None
    width = hunt.copy.element_size()
    raw = hunt.values
    shortest = min(map(len, raw.values()))
    position = next(
        (i for i in range(0, shortest, width) if len({data[i : i + width] for data in raw.values()}) > 1), None
    )
    if position is None:
        return None
    values = {}
    for rank, data in sorted(raw.items()):
        bits = torch.frombuffer(bytearray(data[position : position + width]), dtype=torch.uint8)
        values[str(rank)] = float(bits.view(hunt.copy.dtype)[0])
    flat = hunt.chunk * hunt.chunk_size + position // width
    return {"flat_index": flat, "values": values, "element_of": hunt.name, "values_at_step": hunt.taken_at}
