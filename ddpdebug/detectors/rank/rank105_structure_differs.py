"""RANK105: the ranks wrapped different models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpdebug.detectors.kinds import Examples, Facts, Findings, Severity
from ddpdebug.detectors.rank.wrapping import WrapRule
from ddpdebug.schema.announcements import Structure, StructureEntry
from ddpdebug.schema.step import outvoted
from ddpdebug.schema.wire import to_json

_W, _B = ["parameter", "a.w", [4, 4], "float32", True], ["parameter", "b.w", [4, 4], "float32", True]
_USUAL, _CROSSED = {"digest": "1", "entries": [_W, _B]}, {"digest": "2", "entries": [_B, _W]}
_SHORT: dict[str, Any] = {"digest": "3", "entries": [_W]}
_FIELDS = ("kind", "name", "shape", "dtype", "requires_grad")


class StructureDiffers(WrapRule):
    """The modules that the ranks passed to DDP differ: in names, order, shapes, dtypes or `requires_grad`.

    Impact: DDP pairs parameters by position. Where the order differs, gradients of one layer are averaged with those
    of another of the same size, and the initial broadcast puts rank 0's weights into the wrong layers.

    Diagnosis: the evidence has the first position that differs and what each rank has there. Print
    `[(n, tuple(p.shape)) for n, p in model.named_parameters()]` on every rank right before wrapping and compare.

    Causes:
    - submodules registered in an order that depends on data, a `set`, a directory listing or the rank
    - a configuration that differs between nodes, or another version of the code
    - a layer that is built lazily or only when a file, a device or a package is there
    - parameters frozen or cast on some ranks only

    Remedy:
    - build from a sorted list: `for name in sorted(branches): ...`
    - read the configuration on rank 0 and broadcast it with `dist.broadcast_object_list`
    - freeze and cast on all ranks alike, before wrapping
    """

    code = "RANK105"
    severity = Severity.CRITICAL
    title = "model structure differs between ranks"
    topics = ("structure", "group")
    fires_on = Examples(
        lambda: Facts(topic="structure:0", values={0: _USUAL, 1: _USUAL, 2: _CROSSED}),
        lambda: (
            Facts(topic="structure:0", values={0: _USUAL, 1: _SHORT}),
            Facts(topic="group:0", values={0: {"ranks": [0, 1]}, 1: {"ranks": [0, 1]}}),
        ),
    )
    silent_on = Examples(
        lambda: Facts(topic="structure:0", values={0: _USUAL, 1: _USUAL}),
        lambda: (
            Facts(topic="structure:0", values={0: _USUAL, 1: _SHORT}),
            Facts(topic="group:0", values={0: {"ranks": [0]}, 1: {"ranks": [1]}}),
        ),
        lambda: Facts(topic="structure:0", values={0: _USUAL}),
    )

    def judge(self, index: int, facts: Mapping[int, Structure]) -> Findings:
        digests = {rank: fact.digest for rank, fact in sorted(facts.items())}
        culprits = outvoted(digests)
        if not culprits:
            return
        usual = next((rank for rank in digests if rank not in culprits), next(iter(digests)))
        other = next(rank for rank in culprits if digests[rank] != digests[usual])
        tables = {rank: fact.entries for rank, fact in sorted(facts.items())}
        position = _first_difference(tables[usual], tables[other])
        entries = {str(rank): table[position] if position < len(table) else None for rank, table in tables.items()}
        names = [entry[1] for entry in (entries[str(other)], entries[str(usual)]) if entry]
        yield self.finding(
            step=self.next_step,
            ranks=culprits,
            subject=tuple(dict.fromkeys(names)),
            phase="wrap",
            evidence={
                "wrapper": index,
                "differs": _what(tables[usual], tables[other], position),
                "position": position,
                "entries": to_json(entries),
                "parameters_and_buffers": {str(rank): len(table) for rank, table in tables.items()},
            },
        )


def _first_difference(ours: Sequence[StructureEntry], theirs: Sequence[StructureEntry]) -> int:
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return min(len(ours), len(theirs))


def _what(ours: Sequence[StructureEntry], theirs: Sequence[StructureEntry], position: int) -> str:
    """The kind of difference, in one word."""
    if sorted(map(repr, ours)) == sorted(map(repr, theirs)):
        return "the order"
    if position >= len(ours) or position >= len(theirs):
        return "missing"
    differing = [name for name, a, b in zip(_FIELDS, ours[position], theirs[position], strict=False) if a != b]
    return "names" if "name" in differing else ", ".join(differing) or "entries"
