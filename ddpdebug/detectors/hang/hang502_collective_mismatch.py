"""HANG502: ranks issued different collectives."""

from __future__ import annotations

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.hang.common import HangRule
from ddpdebug.detectors.kinds import Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import Hang
from ddpdebug.schema.progress import REDUCTIONS

_OTHER_CALL = {
    "kind": "mismatch",
    "step": 5,
    "ranks": [0, 1],
    "undecided": [[0], [1]],
    "sides": {"0": "all_reduce #6 of float32 [8] at train.py:41", "1": "broadcast #6 of float32 [8] at train.py:43"},
    "difference": "operation",
    "waits": {"0": "all_reduce #6", "1": "broadcast #6"},
    "waited": 3.0,
}
#: Of calls of the script's own that differ in the shape alone.
_SIZES: Fields = {
    "causes": (
        "a tensor has other sizes on some ranks: the last batch of an epoch, a mask, samples that were left out",
    ),
    "actions": (
        "make the sizes equal: `drop_last=True`, or pad to the largest and cut what was gathered",
        "gather the sizes first; for what is no tensor of one size use `all_gather_object`",
    ),
}


class CollectiveMismatch(HangRule):
    """At the same position in the order of collectives of a group, ranks called different operations.

    Or the same one with other shapes, dtypes or roots; or they wait for each other in a circle, as with two groups that
    are used in another order. A warning of its own title says that all are in the same call, which has not ended for a
    minute: nothing is known to differ, and much data over a slow network looks like that.

    Impact: the job hangs, aborts with a transport error, or pairs unrelated tensors and goes on with wrong data.

    Diagnosis: the evidence has the calls side by side: the one that should not be there names the branch. Look for
    `if rank == 0` around anything that communicates (metrics, `.item()` of a synchronised metric, checkpoint,
    barrier). On nccl set `TORCH_FR_BUFFER_SIZE=2000` (0 switches the recorder off) and `TORCH_NCCL_DUMP_ON_TIMEOUT=1`
    and merge the dumps with `torchfrtrace`. Avoid `TORCH_DISTRIBUTED_DEBUG=DETAIL` with DDP on torch 2.13.0 for CPU,
    where it crashes the constructor.

    Causes:
    - `new_group`: `dist.new_group` called by its members only, or in another order on some ranks
    - `difference order`: two groups, or two collectives, that ranks use in different orders; iteration over a set or an
      unsorted listing decides
    - `difference shape`: control flow that depends on the data: different modules run, so DDP reduces other buckets
    - `difference operation`, `difference root`: a collective inside a condition that only some ranks meet (rank 0
      logging, local early stop, a skipped batch)
    - `difference dtype`: autocast, or the dtype of what is reduced, differs by rank
    - ranks with different numbers of batches, so that one is in evaluation while others train

    Remedy:
    - `new_group`: call `dist.new_group` on all ranks in the same order
    - `difference order`: use groups and collectives in the same order on all ranks: sort what orders them
    - `difference shape`: for data dependent paths use `find_unused_parameters=True`, and `with model.join():` for
      uneven batches
    - `difference dtype`: cast on all ranks alike before the collective
    - let all ranks run the collective and only rank 0 use the result
    - take decisions from a value that was broadcast or all-reduced
    """

    code = "HANG502"
    severity = Severity.CRITICAL
    title = "ranks issued different collectives"
    events = ("hang:mismatch", "hang:cycle")
    fires_on = Examples(
        lambda: Facts(topic="alone:hang", values={0: _OTHER_CALL}),
        lambda: Facts(topic="alone:hang", values={0: {**_OTHER_CALL, "kind": "cycle", "difference": "order"}}),
        lambda: Facts(topic="alone:hang", values={0: {**_OTHER_CALL, "kind": "cycle", "difference": "unknown"}}),
    )
    silent_on = Examples(
        lambda: Facts(topic="alone:hang", values={0: {**_OTHER_CALL, "kind": "stuck"}}),
        lambda: steps(3),
    )

    def judge(self, fact: Hang) -> Fields | None:
        fields = dict(super().judge(fact) or {})
        if fact.difference == "unknown":
            title = "a collective does not end though all ranks are in it"
            fields |= {"severity": Severity.WARNING, "title": title}
        elif fact.difference == "shape" and not any(REDUCTIONS in side for side in fact.sides.values()):
            fields |= _SIZES
        return fields
