"""DATA902: every epoch has the same order."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpdebug.detectors.comparison import announced_at
from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Findings, Severity, Step, Threshold
from ddpdebug.schema.announcements import Announcement, Loader, RepeatedNumbers, RepeatedOrder, Restored
from ddpdebug.schema.row import Flag

#: Batches that are remembered for each rank; longer epochs are left to the samplers' own announcements.
HISTORY = 8192
_ORDER = {"step": 30, "sampler": "Repeated", "set_epoch": True, "epoch": 0, "indices": 64, "location": "train.py:40"}
_LOADER: dict[str, Any] = {"distributed": True, "shuffle": True, "epoch": 0, "replicas": 4, "length": 800}
_RESUMED: Fields = {
    "title": "the sampler starts again at its first epoch after a resume",
    "causes": (
        "a resume that restores model and optimizer, and counts epochs from 0: the orders of the first ones come again",
        "intended: training on, on other data",
    ),
    "actions": ("save the epoch in the checkpoint, and go on with `range(start, epochs)` and `set_epoch(epoch)`",),
}
_BEGUN_AGAIN: Fields = {
    "title": "a resumed epoch begins again, and its first batches are trained on twice",
    "phase": "resume",
    "causes": (
        "a resume in the middle of an epoch that restores the epoch, but not the number of batches that it has had",
        "intended: epochs that are begun again as a whole",
    ),
    "actions": ("save the number of batches, and skip these (or save the state of a `StatefulDataLoader`)",),
}
_NUMBERS: Fields = {
    "title": "every epoch draws the same random numbers",
    "phase": "random numbers",
    "subject": ("random numbers",),
    "causes": (
        "an evaluation or a function that draws samples calls `manual_seed`, and training goes on from there",
        "a seed that is set at the start of each epoch, without the epoch in it",
        "intended: rounds that are to be compared",
    ),
    "actions": (
        "draw samples from a `torch.Generator` of their own, or inside of `torch.random.fork_rng()`",
        "set the seed once, or `seed + epoch`",
    ),
}
_IN_STEPS: Fields = {
    "title": "every step draws the same random numbers",
    "causes": (
        "`manual_seed` with a constant inside of the loop, or in the model's forward: dropout has one mask for ever",
        "intended: noise that belongs to the model and is drawn again each time",
    ),
}


_IN_WORKERS: Fields = {
    "title": "the workers of a loader draw the same random numbers",
    "phase": "workers",
    "causes": (
        "the data set holds a generator: each worker begins each epoch with a copy of it, and augments alike",
        "intended: noise that is the same in each epoch",
    ),
    "actions": (
        "draw from torch's generator or `numpy.random`, which are seeded in each worker",
        "or make the generator in the worker: `np.random.default_rng(torch.initial_seed())` in `worker_init_fn`",
    ),
}


def _resume(steps: int, **more: Any) -> tuple[Facts, ...]:
    loader = {**_LOADER, "batches": 20, "iterations": 1, **more}
    fact = {"kind": "resumed", "class": "AdamW", "step": 0, "steps": steps}
    return (
        Facts(topic="loader:0", values=dict.fromkeys(range(4), loader)),
        Facts(topic="alone:restored", values=dict.fromkeys(range(4), fact)),
    )


def _pass(number: int, step: int, **more: Any) -> Facts:
    return Facts(
        topic="loader:0", values={r: {**_LOADER, "iterations": number, "step": step, **more} for r in range(4)}
    )


def _cycle(number: int, period: int = 4) -> Step:
    own = {rank: {"record_digest": digest(50, rank, number % period)} for rank in range(4)}
    return step_at(number, odd=own)


@dataclass(slots=True)
class _History:
    seen: OrderedDict[int, int] = field(default_factory=OrderedDict)  # fingerprint -> step
    period: int = 0
    since: int = 0  # step of the first repetition
    matches: int = 0
    newest: int = -1

    def add(self, step: int, value: int) -> None:
        """Add the next batch; keeps track of how long everything has come again at the same distance."""
        if step > self.newest + 1:  # batches in between were not seen
            self.seen.clear()
            self.period = self.matches = 0
        self.newest = step
        distance = step - self.seen.pop(value, step)
        if distance and distance == self.period:
            self.matches += 1
        elif distance:
            self.period, self.since, self.matches = distance, step, 1
        else:
            self.period = self.matches = 0
        self.seen[value] = step
        if len(self.seen) > HISTORY:
            self.seen.popitem(last=False)

    def cycles(self, step: int, least: float) -> bool:
        """Whether a whole period of `least` batches or more has been repeated, batch by batch."""
        return self.period >= least and self.matches >= least and step - self.since >= self.period - 1


class SameOrder(Detector):
    """The batches of one epoch come again in the next one, in the same order.

    Or a run that goes on from a checkpoint begins with the order of the first epoch, or begins an epoch again that has
    been trained on in part. Or each epoch draws the same numbers from torch's generators: noise, dropout, augmentation.
    Or each worker of a loader draws the same ones, from its copy of a generator that the data set holds.

    Impact: the model sees the same combinations of samples every epoch. Stochastic gradients lose part of their
    randomness, BatchNorm sees fixed batches, and generalisation suffers a little or a lot.

    Diagnosis: print the first batch's ids at the start of two epochs. With a `DistributedSampler` print
    `sampler.epoch` there too: it must grow.

    Causes:
    - `sampler.set_epoch(epoch)` is missing: `DistributedSampler` shuffles with seed + epoch, and epoch stays 0
    - `set_epoch` is called on another sampler than the loader uses (after `prepare`, or on the wrapped data set)
    - `shuffle=False`, or a generator that is seeded again at the start of each epoch
    - a list of batches made once and used in every epoch
    - `manual_seed` in an evaluation, or at the start of each epoch
    - a generator that the data set made in `__init__`, and `num_workers` above 0

    Remedy:
    - call `sampler.set_epoch(epoch)` at the start of every epoch, before iterating over the loader
    - seed the generator once, outside of the loop over epochs
    - if a fixed order is wanted (curriculum, benchmarks), ignore this warning
    """

    code = "DATA902"
    severity = Severity.WARNING
    title = "every epoch repeats the same order"
    reads = ("record_digest", "batch_digest")
    topics = ("loader", "alone")
    same_order_batches = Threshold(
        3,
        "batches that a repeated cycle has at least",
        source="shorter ones are a fixed batch or two, repeated on purpose",
    )
    fires_on = Examples(
        lambda: Facts(topic="alone:numbers", values={rank: {"step": 30, "epochs": 3} for rank in range(2)}),
        lambda: Facts(topic="alone:numbers", values={rank: {"step": 3, "steps": 4} for rank in range(2)}),
        lambda: Facts(topic="alone:numbers", values={0: {"step": 0, "workers": 2, "name": "Pairs.rng"}}),
        lambda: tuple(_cycle(n) for n in range(8)),
        lambda: (_pass(1, 0), _pass(2, 8), *steps(16)),
        lambda: (_pass(1, 0, batches=8), _pass(2, 5, batches=8), step_at(5, flags=Flag.LOADED), *steps(8, start=6)),
        lambda: Facts(topic="alone:order", values=dict.fromkeys((0, 1), _ORDER)),
        lambda: _resume(60),
    )
    silent_on = Examples(
        lambda: (_resume(19), _resume(60, epoch=3), _resume(60, distributed=False)),
        lambda: steps(12),
        lambda: Facts(topic="alone:order", values={0: {**_ORDER, "set_epoch": False}}),
        lambda: tuple(_cycle(n) for n in range(7)),
        lambda: tuple(_cycle(n, period=2) for n in range(12)),
        lambda: tuple(_cycle(n, period=1) for n in range(12)),
        lambda: (_pass(1, 0, epoch=0), _pass(2, 8, epoch=1), _pass(3, 16, epoch=2), *steps(24)),
        lambda: (_pass(1, 0, batches=8), _pass(2, 5, batches=8), *steps(8)),  # the rest of it, after a resume
        lambda: (_pass(1, 0), *steps(8), _pass(2, 8)),  # nothing trains on the second one: an evaluation, `update_bn`
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._histories: dict[tuple[int, int, str], _History] = {}
        self._loaders: dict[str, Mapping[int, Loader]] = {}  # newest pass over each
        self._trained: dict[str, Mapping[int, Loader]] = {}  # newest that steps have trained on
        self._given: dict[str, int] = {}  # batches that this one has given to steps
        self._per_step = 1  # batches, as far as backward passes tell
        self._loaded = -1  # newest step that a load came before

    def detect(self, step: Step) -> Findings:
        self._per_step = max([1, *step.columns["micro_batches"]])
        self._loaded = step.step if step.any(Flag.LOADED) else self._loaded
        name = next((n for n in ("record_digest", "batch_digest") if step.rows and step.known(n)), None)
        if name is None:
            return
        histories, least = [], self.same_order_batches
        for rank, row in step.followed.items():
            history = self._histories.setdefault((step.optimizer, rank, name), _History())
            history.add(step.step, int(getattr(row, name)))
            histories.append(history)
        if all(history.cycles(step.step, least) for history in histories) and len({h.period for h in histories}) == 1:
            yield self.finding(
                step,
                step=max(history.since for history in histories),
                subject=("batches",),
                evidence={"period": histories[0].period, "observed": "batches come again in the same order"},
            )

    def compare(self, topic: str, facts: Mapping[int, Announcement]) -> Findings:
        own = {rank: fact for rank, fact in facts.items() if isinstance(fact, RepeatedOrder)}
        # what cannot be told the epoch may have a fixed order on purpose
        if told := [(rank, fact) for rank, fact in sorted(own.items()) if fact.set_epoch]:
            first = told[0][1]
            yield self.finding(
                step=first.step,
                ranks=tuple(rank for rank, _ in told),
                subject=(first.sampler,),
                location=first.location,
                evidence={"epoch": first.epoch, "indices_compared": first.indices},
            )
        elif numbers := {r: fact for r, fact in sorted(facts.items()) if isinstance(fact, RepeatedNumbers)}:
            repeated = numbers[min(numbers)]
            counts = {"workers": repeated.workers, "steps": repeated.steps, "epochs": repeated.epochs}
            about = {"ranks": tuple(numbers), "location": repeated.location}
            words = _IN_WORKERS if repeated.workers else _IN_STEPS if repeated.steps else {}
            words = {**words, "subject": (repeated.name,)} if repeated.name else words
            evidence = {what: count for what, count in counts.items() if count}
            yield self.finding(step=repeated.step, **{**_NUMBERS, **words}, **about, evidence=evidence)
        elif restored := {r: fact for r, fact in sorted(facts.items()) if isinstance(fact, Restored)}:
            yield from self._resumed({r: fact for r, fact in restored.items() if fact.kind == "resumed"})
        elif not own:
            yield from self._samplers(topic, {r: fact for r, fact in facts.items() if isinstance(fact, Loader)})

    def _resumed(self, facts: Mapping[int, Restored]) -> Findings:
        """Find a sampler that begins with its first epoch beside an optimizer that has gone through an epoch or more.

        Its loader is the newest.
        """
        steps = min((fact.steps for fact in facts.values()), default=0)
        newest = next(reversed(self._loaders.values()), {})
        again = tuple(rank for rank, fact in newest.items() if _begins(fact) and steps >= (fact.batches or math.inf))
        if again:
            fact = newest[again[0]]
            evidence = {"epoch": fact.epoch, "batches": fact.batches, "steps_of_the_optimizer": steps}
            about = {"phase": "resume", "location": fact.location, "subject": (fact.sampler or "sampler",)}
            yield self.finding(step=facts[min(facts)].step, ranks=again, evidence=evidence, **_RESUMED, **about)

    def _samplers(self, topic: str, facts: Mapping[int, Loader]) -> Findings:
        if not facts:
            return
        begun = announced_at(facts, self.next_step)
        yield from self._passed(topic, begun)
        self._loaders[topic] = facts

    def _passed(self, topic: str, step: int) -> Findings:
        """Compare the newest pass over a loader with the one before it, if steps have trained on it: it ends here."""
        now = self._loaders.get(topic, {})
        if not now or step <= announced_at(now, 0):
            return
        before, self._trained[topic] = self._trained.get(topic, {}), now
        again = {rank: fact for rank, fact in now.items() if _stuck(before.get(rank), fact)}
        given, self._given[topic] = self._given.get(topic, 0), (step - announced_at(now, 0)) * self._per_step
        both = given + self._given[topic]  # of a whole epoch, if the second pass only went on with it
        stuck = tuple(rank for rank, fact in sorted(again.items()) if both > (fact.batches or 0))
        if stuck and len(now) > 1:
            fact = now[stuck[0]]
            resumed = given < (fact.batches or 0) and self._loaded > announced_at(before, 0)
            yield self.finding(
                step=announced_at(now, self.next_step),
                ranks=stuck,
                subject=(fact.sampler or "sampler",),
                evidence={"loader": topic, "epoch": fact.epoch, "iterations": fact.iterations},
                **(_BEGUN_AGAIN if resumed else {}),
            )

    def finish(self) -> Findings:
        for topic in self._loaders:
            yield from self._passed(topic, self.next_step)


def _begins(fact: Loader) -> bool:
    """Whether a shuffling distributed sampler begins with its first epoch."""
    return fact.distributed and bool(fact.shuffle) and fact.epoch == 0 and fact.iterations == 1


def _stuck(before: Loader | None, now: Loader) -> bool:
    """Whether a shuffling distributed sampler begins another pass with the epoch of the last one."""
    if before is None or not (now.distributed and now.shuffle):
        return False
    return now.iterations > before.iterations and now.epoch is not None and now.epoch == before.epoch
