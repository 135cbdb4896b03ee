"""Steps for the examples that rules carry: a healthy run by default, with what the example says put in. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ddpdebug.detectors.base import Facts
from ddpdebug.schema.details import KINDS, Detail, read_detail
from ddpdebug.schema.row import CHECKSUM_SLOTS, Digest, Flag, Row
from ddpdebug.schema.step import Step

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def digest(*parts: int) -> Digest:
    """Return a made-up digest, never 0."""
    value = 1
    for part in parts:
        value = ((value ^ part) * _MIX + 1) & _MASK
    return Digest(value or 1)


def healthy_row(rank: int, step: int, world: int, optimizer: int = 0) -> Row:
    """Return what a rank of a healthy run shows in a step whose every tier ran."""
    sums: dict[str, Any] = {}
    for slot in range(CHECKSUM_SLOTS):
        mean = (0.3 if slot % 2 else -0.2) * (1 + 0.01 * step)
        sums[f"local_sum_{slot}"] = mean + 0.1 * (rank - (world - 1) / 2)
        sums[f"local_norm_{slot}"] = 1.0
        sums[f"reduced_sum_{slot}"] = mean
    return Row(
        rank=rank,
        step=step,
        optimizer=optimizer,
        flags=int(Flag.CHECKED | (Flag.FIRST if step == 0 else Flag(0))),
        backwards=step + 1,
        syncs=step + 1,
        micro_batches=1,
        modes_digest=digest(1),
        batch_digest=digest(2, rank, step),
        record_digest=digest(3, rank, step),
        output_digest=digest(4, rank, step),
        rng_digest=digest(5, rank, step),
        grads_digest=digest(6, step),
        presence_digest=digest(7),
        hyper_digest=digest(8),
        state_digest=digest(9, step),
        params_before_digest=digest(10, step),
        params_after_digest=digest(10, step + 1),
        buffers_digest=digest(11, step),
        loss=0.999**step + 0.05 * ((7 * step + 3 * rank) % 5 - 2),
        lr=0.1,
        local_grad_norm=1.1,
        grad_norm=1.0,
        **sums,
    )


def step_at(
    number: int,
    *,
    world: int = 4,
    optimizer: int = 0,
    odd: Mapping[int, Mapping[str, Any]] | None = None,
    flags: int = 0,
    absent: tuple[int, ...] = (),
    **fields: Any,
) -> Step:
    """Return a step.

    Args:
        odd: rank -> fields of its row that differ from the rest (`flags` are added).
        flags: added to every row.
        absent: ranks without a row.
        fields: detail kinds (rank -> JSON value), or fields of every row.
    """
    details = {kind: {rank: _read(kind, v) for rank, v in fields.pop(kind).items()} for kind in KINDS if kind in fields}
    rows = {}
    for rank in range(world):
        own = dict((odd or {}).get(rank, {}))
        row = healthy_row(rank, number, world, optimizer)._replace(**fields)
        more = int(flags) | int(own.pop("flags", 0))
        if rank not in absent:
            rows[rank] = row._replace(**own)._replace(flags=row.flags | more)
    return Step(step=number, optimizer=optimizer, world=world, rows=rows, details=details)


def _read(kind: str, value: Any) -> Detail:
    """Return the detail that an example gives as JSON; raise ValueError where no run could."""
    detail = read_detail(kind, value)
    if detail is None:
        raise ValueError(f"no {kind}: {value!r}")
    return detail


def steps(count: int, *, start: int = 0, **fields: Any) -> tuple[Step, ...]:
    """Return consecutive steps, all made by `step_at` with the same arguments."""
    return tuple(step_at(start + i, **fields) for i in range(count))


def growing(
    field: str,
    value: Callable[[int], int],
    count: int,
    *,
    declared: int | None = 0,
    holders: Mapping[int, Any] | None = None,
    limit: int = 0,
) -> tuple[Any, ...]:
    """Return steps of two ranks in which a field of the rows follows the step.

    Args:
        declared: growth that the user has declared; None is without a number.
        holders: the `holders` details.
        limit: bytes that the host and the device have; 0 is not known.
    """
    buffer = {rank: [{"what": "buffer", "bytes": declared}] for rank in range(2)}
    facts = {} if declared == 0 else {"growth": buffer}
    told = {topic: Facts(topic=topic, values=values).values for topic, values in facts.items()}
    found = []
    for number in range(count):
        fields: dict[str, Any] = {field: value(number), "host_limit_bytes": limit, "device_limit_bytes": limit}
        if holders is not None:
            fields["holders"] = holders
        found.append(replace(step_at(number, world=2, **fields), facts=told))
    return (*(Facts(topic=topic, values=values) for topic, values in facts.items()), *found)


def holders(name: str, *, graphs: int = 0) -> dict[int, Any]:
    """Return the `holders` details of a rank that found one list."""
    found = {
        "name": name,
        "kind": "list",
        "entries": 60,
        "function": "train",
        "location": "train.py:58",
        "graphs": graphs,
        "tensors": 60,
        "bytes": 0 if graphs else 96 << 20,
    }
    return {0: {"holders": [found], "visits": 4000}}


def tables(world: int, usual: Any, odd: Mapping[int, Any] | None = None) -> dict[int, Any]:
    """Return rank -> value, the same for all but the odd ranks."""
    return {rank: (odd or {}).get(rank, usual) for rank in range(world)}


def gradients(world: int, odd: Mapping[int, Mapping[str, str]] | None = None, **more: Any) -> dict[int, Any]:
    """Return the `gradients` details of a model with parameters `w` and `b`; `odd`: rank -> name -> digest."""
    return {rank: {"digests": {"w": "a1", "b": "b1", **(odd or {}).get(rank, {})}, **more} for rank in range(world)}


def contract(world: int, odd: Mapping[int, Mapping[str, Any]] | None = None, **more: Any) -> dict[int, Any]:
    """Return the `contract` details of a job that keeps DDP's contract, with what the example says put in."""
    usual = {"ddp": 1, "world": world, "groups": [list(range(world))], **more}
    return {rank: {**usual, **(odd or {}).get(rank, {})} for rank in range(world)}
