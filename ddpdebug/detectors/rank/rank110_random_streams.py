"""RANK110: ranks draw the same random numbers where they should differ, or the reverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.kinds import Examples, Findings, Severity, Step, Streak, StreakRule, Threshold
from ddpdebug.schema.row import Flag


def _alike(number: int, **fields: Any) -> Step:
    return step_at(number, flags=Flag.RNG_USED_IN_FORWARD, rng_digest=digest(7, number), **fields)


class RandomStreams(StreakRule):
    """Several ranks draw the same random numbers in their forwards, for different batches.

    Impact: identical streams correlate the noise of the ranks, so that averaging over ranks removes less of it than
    the world size suggests; nothing fails. Draws that must be shared and are not (the same sub-network, the same
    negatives, a shuffle of one common list) make the ranks compute different things.

    Diagnosis: on every rank print `torch.initial_seed()` and the sum of one dropout mask in the named step, then
    `torch.utils.data.get_worker_info().seed` from inside `__getitem__`. Equal values at equal worker ids mean that
    the loaders took their base seed from identically seeded generators. Compare the seeding lines with the place
    where rank is first known.

    Causes:
    - one `torch.manual_seed(seed)` for all ranks, needed for equal initial weights and never changed afterwards
    - a loader whose `generator` carries the same seed on every rank, so that workers of equal id augment alike
    - a checkpoint that restores rank 0's generator state on all ranks
    - the reverse: a decision that all ranks must share (layer drop, sampled shapes) drawn from a per-rank seed

    Remedy:
    - build the model under the common seed, then call `torch.manual_seed(seed + rank)` and seed `random` and numpy
      the same way
    - leave `DistributedSampler(seed=...)` equal on all ranks: it shuffles a common list
    - draw what must be shared from a `torch.Generator` of its own with the common seed, and save generator states
      per rank
    """

    code = "RANK110"
    severity = Severity.WARNING
    title = "ranks draw the same random numbers where they should differ, or the reverse"
    same_random_steps = enough = Threshold(
        16,
        "checked steps in a row in which all ranks drew alike",
        source="a decision that ranks share on purpose is drawn now and then",
    )
    fires_on = Examples(
        lambda: tuple(_alike(n) for n in range(16)),
        lambda: (*steps(3), *(_alike(n) for n in range(3, 19))),
    )
    silent_on = Examples(
        lambda: steps(16, flags=Flag.RNG_USED_IN_FORWARD),
        lambda: tuple(_alike(n) for n in range(15)),
        lambda: tuple(step_at(n, rng_digest=digest(7, n)) for n in range(16)),  # nothing is drawn in forward
        lambda: tuple(_alike(n, batch_digest=digest(8, n)) for n in range(16)),  # stages that share their batch
    )

    def can_show(self, step: Step) -> bool:
        return step.known("rng_digest")

    def shown(self, step: Step) -> Mapping[str, bool] | None:
        if len(step.rows) < 2 or not self.can_show(step):
            return None
        drawn = step.all(Flag.RNG_USED_IN_FORWARD) and "batch_digest" in step.differing
        return {"state": drawn and step.agrees("rng_digest")}

    def report(self, step: Step, streaks: Mapping[str, Streak]) -> Findings:
        evidence = {"observed": "the ranks' generators were in the same state before forwards that draw from them"}
        # the masks of dropout are averaged over many steps as well: worth knowing, seldom worth a change
        first, ranks = streaks["state"].first, tuple(step.rows)
        yield self.finding(step, severity=Severity.INFO, step=first, ranks=ranks, evidence=evidence)
