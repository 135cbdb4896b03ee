"""RANK102: buffers differ where DDP promises that they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES, classes_of, culprits, values_of
from ddpdebug.detectors.examples import step_at, steps, tables as ranks
from ddpdebug.detectors.kinds import ComparisonRule, Examples, Fields, Findings, RankClasses, Severity, Step
from ddpdebug.schema.details import BufferDigests, differing_names
from ddpdebug.schema.row import Flag

_USUAL: dict[str, Any] = {"digests": {"bn.running_mean": "a", "mask": "b"}}
_ODD: dict[str, Any] = {"digests": {"bn.running_mean": "f", "mask": "b"}}
_UNSENT = "DDP was made with `broadcast_buffers=False`, so nothing brings the ranks' buffers together"
_OF_SHARDS: Fields = {
    "causes": (
        "FSDP2 broadcasts no buffers: each rank keeps what its own forwards have written, as BatchNorm does",
        "counts of tokens or samples, from which the script computes the buffer, that are not added up over the ranks",
        "a buffer that nobody has filled again after `to_empty()`",
    ),
    "actions": (
        "add up what the buffer is computed from: `dist.all_reduce(counts)`",
        "use `SyncBatchNorm.convert_sync_batchnorm(model)` before `fully_shard`",
        "before evaluation and saving broadcast or average them: `for b in model.buffers(): dist.broadcast(b, 0)`",
    ),
    # statistics are a rank's own there unless the script averages them, and training itself does not use them
    "severity": Severity.WARNING,
}


class BuffersDiffer(ComparisonRule):
    """Buffers differ between ranks right after DDP should have made them equal, or drift because nothing sends them.

    With FSDP2, which broadcasts none, this is a warning.

    Impact: the ranks normalise, mask or quantise differently in training, and evaluation depends on the rank: the
    checkpoint of rank 0 holds statistics of rank 0's shard only.

    Diagnosis: print the named buffers' sums on every rank at the start of the forward. BatchNorm statistics that
    differ only between a step and the next forward are normal, since DDP broadcasts rank 0's at the start of forward;
    this finding is about what differs after that point.

    Causes:
    - `broadcast_buffers=False` (or `forward_sync_buffers=False`) with BatchNorm or other buffers that training updates
    - a buffer rewritten on some ranks between steps while buffers are not broadcast (statistics, vocabularies, masks)
    - a forward that does not go through DDP, or an `eval()` forward under `no_grad`, where nothing is broadcast
    - a buffer that is replaced (`self.buf = new`) instead of written in place, so that DDP sends the old tensor

    Remedy:
    - leave the broadcast on, or use `SyncBatchNorm.convert_sync_batchnorm(model)` before wrapping
    - compute statistics on one rank and broadcast them, or all-reduce what they are computed from
    - before evaluation and saving average or broadcast the buffers: `for b in model.buffers(): dist.broadcast(b, 0)`
    """

    code = "RANK102"
    severity = Severity.ERROR
    title = "buffers differ between ranks"
    reads = ("buffers_digest",)
    of_several = True
    wants = ("buffers",)
    fires_on = Examples(
        lambda: step_at(20, odd={1: {"buffers_digest": 5}}, buffers=ranks(4, _USUAL, {1: _ODD})),
        lambda: step_at(
            0, flags=Flag.BUFFERS_NOT_BROADCAST, odd={rank: {"buffers_digest": 5 + rank} for rank in range(4)}
        ),
        lambda: step_at(0, flags=Flag.SHARDED | Flag.NO_DDP, odd={1: {"buffers_digest": 5}}),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(2, buffers_digest=0),
        lambda: step_at(2, odd={1: {"buffers_digest": 0}}),
    )

    def rank_classes(self, step: Step) -> RankClasses | None:
        return classes_of(step, "buffers_digest")

    def report(self, step: Step, classes: RankClasses) -> Findings:
        by_rank = {rank: told.digests for rank, told in step.answers(BufferDigests).items()}
        names = differing_names(by_rank)
        sharded = step.any(Flag.SHARDED)
        unsent = sharded or step.any(Flag.BUFFERS_NOT_BROADCAST)
        evidence: dict[str, Any] = {"buffers": len(names), **({} if sharded else {"broadcast_buffers": not unsent})}
        if names:
            evidence["digests"] = values_of(by_rank, names[0])
        finding = self.finding(
            step,
            ranks=culprits(classes),
            subject=tuple(names[:MAX_NAMES]),
            phase="not-broadcast" if unsent else "after-broadcast",
            evidence=evidence,
        )
        if sharded:
            yield replace(finding, **_OF_SHARDS)
        else:
            yield replace(finding, causes=(_UNSENT, *finding.causes[1:])) if unsent else finding
