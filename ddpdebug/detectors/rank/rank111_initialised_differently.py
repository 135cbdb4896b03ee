"""RANK111: the ranks drew different initial weights before DDP made them equal."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdebug.detectors.comparison import MAX_NAMES, values_of
from ddpdebug.detectors.kinds import Examples, Facts, Findings, Severity
from ddpdebug.detectors.rank.wrapping import WrapRule
from ddpdebug.schema.announcements import InitialValues
from ddpdebug.schema.details import differing_names
from ddpdebug.schema.step import outvoted

_ONE, _TWO = {"digests": {"w": "1", "b": "0"}}, {"digests": {"w": "2", "b": "0"}}


class InitialisedDifferently(WrapRule):
    """Before DDP broadcast rank 0's parameters and buffers, the ranks had different ones.

    Impact: none for the wrapped module, since the broadcast repairs it. Whatever is made from the same seeds and is
    not wrapped (an EMA copy taken before wrapping, a second module, a projection in the loss) is not repaired.

    Diagnosis: print `torch.initial_seed()` on every rank before the model is built. Look for modules built near by
    that DDP does not wrap.

    Causes:
    - each rank seeds with its own number (`torch.manual_seed(seed + rank)`) before building the model
    - no seed is set at all
    - random numbers are drawn on some ranks before the model is built

    Remedy:
    - nothing, if every trained module is wrapped
    - otherwise build all modules under a common seed, and seed by rank afterwards for dropout and augmentation
    """

    code = "RANK111"
    severity = Severity.INFO
    title = "ranks were initialised differently before DDP's broadcast"
    topics = ("init", "group")
    incident = ("ranks",)  # told once: jobs that do not seed do so with each model that they wrap
    fires_on = Examples(
        lambda: Facts(topic="init:0", values={0: _ONE, 1: _TWO}),
        lambda: Facts(topic="init:1", values={0: _ONE, 1: _ONE, 2: _TWO}),
    )
    silent_on = Examples(
        lambda: Facts(topic="init:0", values={0: _ONE, 1: _ONE}),
        lambda: Facts(topic="init:0", values={0: _ONE}),
        lambda: Facts(topic="init:0", values={0: {"digests": {"w": "1"}}, 1: {"digests": {"other": "2"}}}),
    )

    def judge(self, index: int, facts: Mapping[int, InitialValues]) -> Findings:
        by_rank = {rank: fact.digests for rank, fact in sorted(facts.items())}
        everywhere = [name for name in differing_names(by_rank) if all(name in table for table in by_rank.values())]
        if not everywhere:
            return
        shown = {rank: tuple(table[name] for name in everywhere) for rank, table in by_rank.items()}
        yield self.finding(
            step=self.next_step,
            ranks=outvoted(shown),
            subject=tuple(everywhere[:MAX_NAMES]),
            phase="init",
            evidence={
                "wrapper": index,
                "tensors": len(everywhere),
                "digests": values_of(by_rank, everywhere[0]),
            },
        )
