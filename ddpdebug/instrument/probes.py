"""The probes of one process: each is made here, with its dependencies.

To add one, write its file, in which its constructor subscribes to events (`probes/training_events.py`), and add the
line that makes it.
"""

from __future__ import annotations

from collections.abc import Callable

from ddpdebug.device_fingerprint import forget_tables
from ddpdebug.exchange.step_vote import NumericGuard
from ddpdebug.forensics.loss.dropout_calls import dropout_calls
from ddpdebug.forensics.sample_mixing import Mixing
from ddpdebug.forensics.target_leak import Leaks
from ddpdebug.instrument.patches import Patches
from ddpdebug.isolation.child import Children
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.buffers import Buffers
from ddpdebug.probes.collective_notes import CollectiveNotes
from ddpdebug.probes.collector_pauses import CollectorPauses
from ddpdebug.probes.device_times import DeviceClock, cuda_device
from ddpdebug.probes.end_numbers import EndNumbers
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.forward_capture import ForwardCaptures
from ddpdebug.probes.gradient_hooks import GradientHooks
from ddpdebug.probes.holding import BOUND
from ddpdebug.probes.last_state import LastState
from ddpdebug.probes.loaders import Loaders
from ddpdebug.probes.loop_calls import LoopCalls
from ddpdebug.probes.memory import MemoryProbe
from ddpdebug.probes.models import Models
from ddpdebug.probes.nonfinite import Numerics
from ddpdebug.probes.own_times import OwnClock
from ddpdebug.probes.random_draws import RandomDraws
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.recorder import Recorder
from ddpdebug.probes.replicas import Replicas
from ddpdebug.probes.shard_gathers import ShardGathers
from ddpdebug.probes.shard_reductions import ShardReductions
from ddpdebug.probes.step_digests import StepDigests
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.step_veto import StepVeto
from ddpdebug.probes.training_events import Bus
from ddpdebug.probes.training_loop.training_loop import Recipe
from ddpdebug.probes.training_loop.validation_loss import Evaluations
from ddpdebug.probes.unwatched_steps import UnwatchedSteps
from ddpdebug.schema.announcements import Announce


def _nothing() -> None:
    """Stand in where nothing subscribes."""


def _nothing_of(*_: int) -> None:
    """Stand in likewise."""


def _always(*_: int) -> bool:
    """Have every step watched."""
    return True


class Probes:
    """All probes of one process, and their wrappers in torch.

    Args:
        hand_over: takes a finished record; must not block.
        announce: tells all ranks.
        due: tells for (optimizer, step) whether the sampled tier runs.
        watched: tells whether the step has a row.
        passed: is told (optimizer, step) of one that has none.
        hand_over_last: takes what the last step of an optimizer has left.
        on_group: called when a process group may have come into being.
        stop: returns what is to be raised in the job now, if anything.
        vote: counts the ranks' votes on steps; None looks at nothing numeric.
        keep_inputs: bytes of inputs that are held for replays.
        replay: code of the script's may run a second time, in copies of the process.
        want_norms: a comparison with a tolerance needs numbers, not digests.
        validation_loss: where validation losses are read, as the setting says.
        looks_at_all: tells whether a check looks at all modules, however many there are.
    """

    def __init__(  # noqa: PLR0913 - what they depend on
        self,
        guard: Guard,
        hand_over: Callable[[StepRecord], None],
        announce: Announce,
        due: Callable[[int, int], bool],
        *,
        watched: Callable[[int, int], bool] = _always,
        passed: Callable[[int, int], None] = _nothing_of,
        hand_over_last: Callable[[StepRecord], None] | None = None,
        on_group: Callable[[], None] = _nothing,
        stop: Callable[[], BaseException | None] = _nothing,
        vote: NumericGuard | None = None,
        keep_inputs: int = BOUND,
        replay: bool = True,
        want_norms: bool = False,
        validation_loss: str = "modules",
        looks_at_all: Callable[[], bool] = lambda: False,
    ) -> None:
        self._guard, self._stop, self.entries = guard, stop, entries_of(guard)
        self.bus, self.state = Bus(guard), StepState()
        bus, state = self.bus, self.state
        voting = vote is not None and vote.active
        self.captures = ForwardCaptures(guard, keep_inputs)
        self.children = Children(guard) if replay else None
        self.memory = MemoryProbe(bus, state)
        self.buffers = Buffers(bus, state, guard)
        self.calls = LoopCalls(bus, state, announce)
        self.loaders = Loaders(bus, state, announce)
        self.numerics = Numerics(
            bus,
            state,
            guard,
            self.calls,
            self.captures,
            on=vote is not None,
            every_step=voting,
            looks_at_all=looks_at_all,
        )
        self.hooks = GradientHooks(state, guard, self.numerics)
        self.models = Models(bus, state, guard, announce, self.hooks)
        self.recorder = Recorder(
            bus,
            state,
            guard,
            models=self.models,
            hooks=self.hooks,
            calls=self.calls,
            veto=StepVeto(guard, vote) if vote is not None and voting else None,
            hand_over=hand_over,
            announce=announce,
            due=due,
            watched=watched,
            passed=passed,
        )
        self.collectives = CollectiveNotes(bus, state, guard)
        unwatched = UnwatchedSteps(
            bus,
            state,
            guard,
            recorder=self.recorder,
            collectives=self.collectives,
            watched=watched,
            passed=passed,
        )
        self.own_clock = OwnClock(bus, state, guard)
        self.pauses = CollectorPauses(bus, state, guard)
        self.device_clock = DeviceClock(bus, state, guard, self.hooks, cuda_device)
        self.draws = RandomDraws(bus, state, announce, due)
        self.digests = StepDigests(bus, state, want_norms=want_norms)
        self.replicas = Replicas(bus, state, guard)
        self.shard_reductions = ShardReductions(bus, state, guard)
        self.shard_gathers = ShardGathers(bus, state, guard)
        self.last_state = LastState(bus, state, guard, hand_over_last or hand_over, due)
        self.end_numbers = EndNumbers(bus, state, guard, self.numerics, hand_over)
        self.captures.subscribe(bus, state)
        self.recipe = Recipe(
            bus,
            state,
            guard,
            models=self.models,
            calls=self.calls,
            loaders=self.loaders,
            captures=self.captures,
            announce=announce,
            leaks=Leaks(self.children, guard, announce, looks_at_all),
            mixing=Mixing(self.children, guard, announce, looks_at_all),
            dropout_calls=dropout_calls,
        )
        self.evaluations = Evaluations(
            bus,
            state,
            guard,
            calls=self.calls,
            loaders=self.loaders,
            tell=self.recipe.tell,
            source=validation_loss,
        )
        self.patches = Patches(
            bus,
            state,
            guard,
            on_group=on_group,
            stop=self._stop_here,
            unwatched=unwatched,
            numerics=self.numerics,
            evaluations=self.evaluations,
            functions=validation_loss == "functions",
        )
        guard.when_cut(self.digests.cut)
        guard.when_cut(self.entries.calls.tidy)  # after the others: it takes away what they have left in place

    def _stop_here(self) -> None:
        """Raise what all ranks agreed to raise at this step, if anything (`--steps`, `on_finding="raise"`, guard)."""
        if (error := self.recorder.take_halt() or self._guard.contain("stop", self._stop)) is not None:
            raise error

    def meet(self, world: int) -> None:
        """Set the number of ranks after the meeting."""
        self.state.world, self.entries.threads.compared = world, world > 1
        if world > 1:
            self.collectives.install()

    def remove(self, *, finished: bool = False) -> None:
        """Remove all wrappers from torch.

        Args:
            finished: the script or an epoch of it came to its end, so that what has not happened will not.
        """
        self._guard.run("close:recipe", self.recipe.close, finished=finished)
        self._guard.run("close:evaluation", self.evaluations.close)
        self.patches.remove()

    def release(self) -> None:
        """Remove every hook from the user's tensors and modules."""
        self.models.release()
        self.replicas.release()
        self.draws.release()
        self.captures.clear()
        self.device_clock.release()
        forget_tables()
