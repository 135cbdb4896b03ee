"""The record of one optimizer step, in parts that probes fill, and its encoding as a row.

A part belongs to the probe that fills it and is defined in that probe's file: it names its columns of the row, and
what a detail tells of it. What is noted before the optimizer steps is in `SinceLastStep.parts`, what is noted at the
step itself in `StepRecord.parts`.

Until the recorder hands a record over, as its step ends, all of it belongs to the training thread, and parts are begun
and filled there alone. From then on it belongs to the background thread, which makes the row, lets go of tensors and
answers questions; the training thread has begun another `SinceLastStep` by then and at most reads what it has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ddpdebug import fingerprint
from ddpdebug.devices import failure, keep
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.sharding import Sharding
from ddpdebug.schema.details import Contract
from ddpdebug.schema.row import Flag, Row, encode


class Part:
    """The notes of one probe in one step. Its constructor takes no arguments: it is made on first access."""

    __slots__ = ()
    key: ClassVar[str]  # under which it is off once its columns have failed: that of its probe

    def __init_subclass__(cls, key: str = "") -> None:
        if key:  # a dataclass with slots is made a second time
            cls.key = key

    def columns(self, record: StepRecord, /) -> dict[str, Any]:
        """Return the part's columns of the row by name, `flags` among them; missing ones are unknown.

        Runs in the background thread, where waiting for a device is allowed.
        """
        del record
        return {}

    def let_go(self) -> None:
        """Keep numbers instead of tensors after the row is encoded: a record stays in the ring for many steps."""


_P = TypeVar("_P", bound=Part)


class Parts(dict[type[Part], Part]):
    """Parts by their class. `parts[Clips]` makes a missing one, `parts.get(Clips)` does not."""

    __slots__ = ()
    if TYPE_CHECKING:

        def __getitem__(self, kind: type[_P]) -> _P: ...
        def get(self, kind: type[_P]) -> _P | None: ...  # type: ignore[override]  # noqa: D102 - that of a dict

    def __missing__(self, kind: type[_P]) -> _P:
        part = self[kind] = kind()
        return part


@dataclass(slots=True)
class SinceLastStep:
    """The events since the previous row: forwards, backwards and the probes' notes of them."""

    started: float = 0.0
    overhead_before: float = 0.0
    number: int = 0  # of the step that this is expected to end in, alike on all ranks
    cut: bool = False  # an exception has cut it short: what is here is not all
    micro_batches: int = 0
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    parts: Parts = field(default_factory=Parts)


@dataclass(slots=True)
class StepRecord:
    """One optimizer step of this rank with everything that a detail request may ask for."""

    optimizer: int
    step: int
    flags: Flag
    since: SinceLastStep
    checked: bool = False  # the sampled tier runs
    names: Sequence[str] = ()  # of the optimizer's parameters; what follows is in the same order
    owned: Sequence[bool] = ()
    ids: Sequence[int] = ()
    slots: Mapping[int, int] = field(default_factory=dict)
    sharding: Sharding | None = None  # where these are DTensors: which ranks share what of them
    contract: Contract = field(default_factory=Contract)
    fields: dict[str, Any] = field(default_factory=dict)  # counts and times, which go into the row as they are
    parts: Parts = field(default_factory=Parts)


def combined(digests: Sequence[int]) -> int:
    """Return one digest of several; 0, which means *not computed*, if there are none."""
    return fingerprint.combine(digests) if digests else 0


def encode_row(record: StepRecord, rank: int, guard: Guard) -> bytes:
    """Return the encoded row of a record; runs in the background thread.

    A part that fails goes off under its key, and the row has the columns of the others.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    everything = (record.since.parts, record.parts)
    for parts in everything:
        for part in tuple(parts.values()):  # one may begin another that it asks for
            if part.key not in guard.off:
                try:
                    found.append((part.key, part.columns(record)))
                except BaseException as error:  # noqa: BLE001 - whatever it is, the other parts are still right
                    guard.fail(part.key, error)
    for parts in everything:
        _let_go(parts, guard)
    if failure.failed:
        keep(record)
    try:
        return _packed(record, rank, found)
    except Exception:  # noqa: BLE001 - a column that the row does not have, or a value that does not fit into it
        return _packed(record, rank, [(key, own) for key, own in found if _fits(key, own, guard)])


def _let_go(parts: Parts, guard: Guard) -> None:
    for kind, part in tuple(parts.items()):
        if failure.failed:  # what it holds may be the device's
            return
        try:
            part.let_go()
        except BaseException as error:  # noqa: BLE001 - whatever it is; what the part holds goes with it
            guard.fail(part.key, error)
            if not failure.failed:
                del parts[kind]


def _packed(record: StepRecord, rank: int, found: Sequence[tuple[str, Mapping[str, Any]]]) -> bytes:
    fields = dict(record.fields)
    flags = int(record.flags) | (int(Flag.CHECKED) if record.checked else 0)
    for _, own in found:
        flags |= int(own.get("flags", 0))  # operators of IntFlag are slow
        fields.update(own)
    fields["flags"] = flags
    return encode(Row(rank=rank, step=record.step, optimizer=record.optimizer, **fields))


def _fits(key: str, columns: Mapping[str, Any], guard: Guard) -> bool:
    try:
        encode(Row(**columns))
    except Exception as error:  # noqa: BLE001 - of one part
        guard.fail(key, error)
        return False
    return True
