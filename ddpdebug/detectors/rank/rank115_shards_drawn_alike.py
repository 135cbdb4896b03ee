"""RANK115: the shards of a parameter began with the same numbers."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Findings, Severity
from ddpdebug.schema.announcements import MeshPlace
from ddpdebug.schema.details import part_name, whole_name

_FIRST, _SECOND = (part_name("head.weight", f"dp {place} of 2") for place in range(2))


class ShardsDrawnAlike(Detector):
    """Ranks hold different parts of a matrix, and the same numbers in them, at the first step.

    Impact: rows (or columns) of the matrix come once for each rank: units of a layer are copies of each other, words
    share a vector. They part slowly or never, and the model is smaller than it looks.

    Diagnosis: print `p.to_local()` of the named matrices on two ranks before the first step. Experts are left out, and
    so are matrices with equal rows.

    Causes:
    - each rank fills its own part under a common seed: `p.to_local().normal_()` after `torch.manual_seed(0)`
    - a part of the same rank was copied to all others: a broadcast over the wrong dimension of the mesh
    - intended: layers that are built of copies

    Remedy:
    - initialise the whole model before `fully_shard`, or load it from rank 0
    - or draw on the DTensor: `nn.init.normal_(p)`; on devices its numbers depend on the place of the part, on the CPU
      they do not
    - or seed by the place of the part before each rank fills its own
    """

    code = "RANK115"
    severity = Severity.WARNING
    title = "the shards of a parameter began with the same numbers"
    of_several = True
    topics = ("mesh",)
    fires_on = Examples(
        lambda: Facts(topic="mesh:0", values={0: {"drawn": {_FIRST: "a"}}, 1: {"drawn": {_SECOND: "a"}}}),
        lambda: Facts(
            topic="mesh:1", values={r: {"drawn": {(_FIRST, _SECOND)[r // 2]: "a"}, "model": "m"} for r in range(4)}
        ),
    )
    silent_on = Examples(
        lambda: Facts(topic="mesh:0", values={0: {"drawn": {_FIRST: "a"}}, 1: {"drawn": {_SECOND: "b"}}}),
        lambda: Facts(topic="mesh:0", values={0: {"drawn": {_FIRST: "a"}}, 1: {"drawn": {_FIRST: "a"}}}),  # replicas
        lambda: Facts(topic="mesh:0", values={0: {}, 1: {}}),
    )

    def compare(self, topic: str, facts: Mapping[int, MeshPlace]) -> Findings:
        seen: dict[tuple[str, str], dict[str, list[int]]] = {}  # name and mark -> part -> ranks
        for rank, fact in sorted(facts.items()):
            for part, mark in fact.drawn.items():
                seen.setdefault((whole_name(part), mark), {}).setdefault(part, []).append(rank)
        alike = {name: parts for (name, _), parts in seen.items() if len(parts) > 1}
        if not alike:
            return
        name = next(iter(alike))
        ranks = {rank for parts in alike.values() for own in parts.values() for rank in own}
        yield self.finding(
            step=self.next_step,
            ranks=tuple(sorted(ranks)),
            subject=tuple(alike)[:MAX_NAMES],
            phase="init",
            evidence={"optimizer": int(topic.rpartition(":")[2]), "parts": list(alike[name])[:MAX_NAMES]},
        )
