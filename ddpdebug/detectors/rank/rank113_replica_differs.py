"""RANK113: a copy outside DDP that should be the same everywhere is not."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES, classes_of
from ddpdebug.detectors.examples import digest, step_at, steps, tables as ranks
from ddpdebug.detectors.kinds import ComparisonRule, Examples, Finding, Findings, RankClasses, Severity, Step
from ddpdebug.schema.details import Replica, Replicas, differing_names
from ddpdebug.schema.step import outvoted

#: Statistics of normalisation layers follow each rank's own data until someone averages them.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _look(value: str, *, changed: bool = True, used: bool = False, name: str = "w") -> dict[str, Any]:
    return {"EMA": {"digest": value, "tensors": {name: value}, "changed": changed, "used": used}}


_ODD: dict[int, Any] = {1: {"replicas_digest": digest(5)}}


class ReplicaDiffers(ComparisonRule):
    """A module outside DDP that every rank keeps (EMA, teacher, target network) differs between ranks.

    Impact: DDP looks after the wrapped module only. Pseudo-labels, targets and exported averages depend on the rank,
    and with a teacher the gradients of the ranks pull in different directions.

    Diagnosis: print the sum of the named tensor of the copy on every rank, right after it is made and after each
    update, and compare with the wrapped module's. A copy made before wrapping has this rank's own initial weights.

    Causes:
    - the copy was made (`copy.deepcopy(model)`) before DDP broadcast rank 0's weights, under a seed per rank
    - it is updated on some ranks only, or at different steps, and then used on all
    - it is initialised or loaded per rank: a random target network, a teacher checkpoint found on one node
    - its buffers follow each rank's own data (BatchNorm in train mode)

    Remedy:
    - make copies from the wrapped model (`copy.deepcopy(ddp_model.module)`), or broadcast them once after making them
    - update copies on all ranks in the same step, from parameters that agree
    - if a copy is kept by rank 0 for saving only, use it on rank 0 only: then nothing is reported
    """

    code = "RANK113"
    severity = Severity.ERROR
    title = "a copy outside DDP differs between ranks"
    reads = ("replicas_digest",)
    of_several = True
    wants = ("replicas",)
    fires_on = Examples(
        lambda: step_at(8, replicas_digest=digest(4), odd=_ODD, replicas=ranks(4, _look("a"), {1: _look("f")})),
        lambda: step_at(
            8,
            world=2,
            replicas_digest=digest(4),
            odd=_ODD,
            replicas={0: _look("a", changed=False, used=True), 1: _look("f", changed=False, used=True)},
        ),
    )
    silent_on = Examples(
        lambda: steps(3, replicas_digest=digest(4)),
        lambda: (  # kept on rank 0 only
            step_at(
                8,
                replicas_digest=digest(4),
                odd={0: {"replicas_digest": digest(5)}},
                replicas=ranks(4, _look("a", changed=False), {0: _look("f")}),
            ),
        ),
        lambda: (  # statistics of this rank's data
            step_at(
                8,
                replicas_digest=digest(4),
                odd=_ODD,
                replicas=ranks(4, _look("a", name="bn.running_mean"), {1: _look("f", name="bn.running_mean")}),
            ),
        ),
        lambda: step_at(8, replicas_digest=digest(4), odd=_ODD),  # no details: nobody can tell which copies count
    )

    def rank_classes(self, step: Step) -> RankClasses | None:
        return classes_of(step, "replicas_digest")

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        return (finding.evidence.get("copy"),)

    def report(self, step: Step, classes: RankClasses) -> Findings:
        answers = {rank: told.copies for rank, told in step.answers(Replicas).items()}
        for name in sorted({name for copies in answers.values() for name in copies}):
            looks = {rank: copies[name] for rank, copies in answers.items() if name in copies}
            finding = self._judge(step, name, looks)
            if finding is not None:
                yield finding

    def _judge(self, step: Step, name: str, looks: Mapping[int, Replica]) -> Finding | None:
        concerned = _concerned(looks)
        by_rank = {rank: looks[rank].tensors for rank in concerned}
        names = [tensor for tensor in differing_names(by_rank) if not tensor.endswith(_STATISTICS)]
        if len(concerned) < 2 or not names:
            return None
        shown = {rank: tuple(by_rank[rank].get(tensor) for tensor in names) for rank in concerned}
        return self.finding(
            step,
            ranks=outvoted(shown),
            subject=tuple(f"{name}: {tensor}" for tensor in names[:MAX_NAMES]),
            evidence={
                "copy": name,
                "tensors": len(names),
                "compared": list(concerned),
                "updated_on": [rank for rank in looks if looks[rank].changed],
                "digests": {str(rank): looks[rank].digest for rank in concerned},
            },
        )


def _concerned(looks: Mapping[int, Replica]) -> Sequence[int]:
    """Return the ranks whose copies must agree: those that update it, or, if none does, those that use it."""
    changed = [rank for rank in sorted(looks) if looks[rank].changed]
    return changed or [rank for rank in sorted(looks) if looks[rank].used]
