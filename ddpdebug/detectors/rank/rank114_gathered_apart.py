"""RANK114: what a rank has gathered of the parameters is not what the ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import step_at, tables
from ddpdebug.detectors.kinds import Detector, Examples, Fields, Findings, Severity, Step
from ddpdebug.schema.details import Gradients, differing_names
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import outvoted

_SHARDS: dict[str, Any] = {"flags": Flag.SHARDED | Flag.NO_DDP | Flag.CHECKED, "gathered_key": 3, "gathered_values": 7}
_USUAL: dict[str, Any] = {"gathered": {"w": "a1", "b": "b1"}}
_ZEROS: dict[str, Any] = {"gathered": {"w": "00", "b": "b1"}}
_LOST: dict[int, Any] = {1: {"gathered_values": 8}}
_KEPT: dict[str, Any] = {"flags": _SHARDS["flags"] | Flag.KEPT_GATHERED}
_STALE: Fields = {
    "phase": "kept",
    "title": "the model goes on with parameters that the optimizer has left behind",
    "causes": (
        "`set_reshard_after_backward(False)`, meant for the micro-batches of one step, that is on in the last of them",
        "`unshard()` before the optimizer's step, of a module that nothing reshards before its next forward",
        "values written into the parts (a checkpoint, an average) while the module was gathered",
    ),
    "actions": (
        "call `set_reshard_after_backward(True)` before the backward that comes before the optimizer's step",
        "or call `reshard()` of each such module after the optimizer's step",
    ),
}


class GatheredApart(Detector):
    """Parameters that FSDP2 has gathered are other ones on some ranks, or are not those that the rank holds any more.

    In checked steps each rank reads what it has gathered for a forward and for its backward: ranks that gather from
    each other must get the same bytes. Of what is still gathered as its gradients are reduced, the piece that is the
    rank's own must be the part that its optimizer steps.

    Impact: the ranks compute gradients of different models and average them; or, with phase `kept`, the model stays
    as it was when it was gathered, while the optimizer moves parts that nothing reads.

    Diagnosis: without a phase the ranks that got other bytes than most are named, and with two ranks both. `kept`: the
    module was not gathered again after the optimizer's step; the loss does not fall although parts change.

    Causes:
    - communication of the script's own (`set_custom_all_gather`) that returns before the buffer is filled, or fills a
      part of it
    - corrupted communication: faulty link, network card, memory or driver, if nobody touches the gathering
    - parameters that one rank changes while they are gathered (`unshard()`, a forward hook)

    Remedy:
    - take the script's own communication out and compare a step: FSDP2's gathering must make the finding disappear
    - without any run the vendor's collective test (for example all_gather_perf) on the nodes involved
    - change parameters as parts, between steps, on all ranks
    """

    code = "RANK114"
    severity = Severity.CRITICAL
    title = "gathered parameters are not those that the ranks hold"
    reads = ("gathered_values", Flag.KEPT_GATHERED)
    of_several = True
    wants = ("gradients",)
    fires_on = Examples(
        lambda: step_at(4, **_SHARDS, odd=_LOST, gradients=tables(4, _USUAL, {1: _ZEROS})),
        lambda: step_at(4, **_KEPT, gradients=tables(4, {"kept": ["w"]}, {})),
    )
    silent_on = Examples(
        lambda: step_at(4, **_SHARDS),
        lambda: step_at(4, **_SHARDS, odd={1: {"gathered_values": 8, "gathered_key": 4}}),  # gathers from others
        lambda: step_at(4, **_SHARDS, odd=_LOST, gradients=tables(4, _USUAL, {})),
        lambda: step_at(4, **_SHARDS, odd={1: {"gathered_values": 0}}),
    )

    def suspects(self, step: Step) -> bool:
        return bool(_apart(step)) or step.any(Flag.KEPT_GATHERED)

    def detect(self, step: Step) -> Findings:
        told = step.answers(Gradients)
        if kept := step.ranks_with(Flag.KEPT_GATHERED):
            names = sorted({name for own in told.values() for name in own.kept})
            evidence: dict[str, Any] = {"parameters": len(names)}
            yield self.finding(step, ranks=tuple(kept), subject=tuple(names[:MAX_NAMES]), evidence=evidence, **_STALE)
        for shown in _apart(step):
            tables_of = {rank: told[rank].gathered for rank in shown if rank in told and told[rank].gathered}
            alike = len({frozenset(table) for table in tables_of.values()}) == 1
            names = sorted(differing_names(tables_of)) if alike else []
            if not names:
                continue  # a gather was looked at on some ranks only
            by_rank = {rank: table.get(names[0]) for rank, table in tables_of.items()}
            evidence = {"parameters": len(names), "digests": {str(rank): by_rank[rank] for rank in sorted(by_rank)}}
            yield self.finding(step, ranks=tuple(outvoted(shown)), subject=tuple(names[:MAX_NAMES]), evidence=evidence)


def _apart(step: Step) -> list[Mapping[int, int]]:
    """Return what ranks show that gather from each other, where it is not one and the same."""
    groups: dict[int, dict[int, int]] = {}
    for rank, row in step.rows.items() if step.any(Flag.SHARDED) else ():
        if row.gathered_key and row.gathered_values:
            groups.setdefault(row.gathered_key, {})[rank] = row.gathered_values
    return [shown for shown in groups.values() if len({*shown.values()}) > 1]
