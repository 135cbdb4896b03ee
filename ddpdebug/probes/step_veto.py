"""The training thread's part of the numeric guard: votes before each step, and keeps the optimizer from a bad one.

A step is skipped by taking the gradients away: torch's optimizers then change neither parameters nor state. They stay
away, as after `zero_grad()`. Schedulers and the code around it see an ordinary step.
"""

from __future__ import annotations

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.errors import FindingError
from ddpdebug.exchange.step_vote import Ballot, NumericGuard
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.nonfinite_notes import Looks
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import StepRecord
from ddpdebug.schema.row import Flag

_APART = Flag.IN_JOIN | Flag.LOCAL_ONLY
_BAD = Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE
_UNGUARDED = "an optimizer that computes its own gradients (closure) or steps inside backward is not guarded"


class StepVeto:
    """The vote of one rank on each step.

    Args:
        guard: whose time the wait for other ranks is taken off.
        vote: counts the ranks' votes.
    """

    def __init__(self, guard: Guard, vote: NumericGuard) -> None:
        self._guard, self._vote = guard, vote
        self._ending: tuple[Ballot, str | None] | None = None
        self._told = False

    def keeps_from(self, optimizer: torch.optim.Optimizer, watch: OptimizerWatch, record: StepRecord) -> bool:
        """Skip the step if it is bad on any rank; return True if the run has to end instead."""
        shared = bool(record.flags & Flag.GRADS_NONFINITE)
        own = bool(record.flags & (_BAD | Flag.LOSS_NONFINITE))
        own = own or (watch.on_cpu and record.since.parts[Looks].loss is not None)  # of a device any loss is noted
        handled = bool(record.flags & Flag.SKIPPED)  # by the gradient scaler, inside the optimizer
        ballot = Ballot(
            optimizer=watch.index,
            step=watch.step,
            own=own and not handled,
            shared=shared and not handled,
            together=not record.flags & _APART,
        )
        started = time.perf_counter()
        bad = self._vote.decide(ballot)
        self._guard.forgive(time.perf_counter() - started)
        if not bad:
            return False
        record.flags |= Flag.GUARD_SKIPPED
        note = self._vote.too_many(ballot.optimizer, ballot.step) if self._vote.mode == "skip" else None
        if self._vote.mode == "stop" or note is not None:
            self._ending = (ballot, note)
            return True
        for parameter in internals.params(optimizer):
            parameter.grad = None
        return False

    def error(self) -> FindingError | None:
        """Return the error that ends the run, after the step's record was handed over; None if it goes on."""
        if self._ending is None:
            return None
        ending, self._ending = self._ending, None
        return self._vote.error(*ending)

    def abstain(self, watch: OptimizerWatch) -> None:
        """Announce that the gradient scaler skips this step on this rank."""
        self._vote.abstain(watch.index, watch.step)

    def tell_unguarded(self) -> None:
        """Report once that the guard does not cover a step."""
        if not self._told:
            self._told = True
            self._guard.tell("guard", _UNGUARDED)
