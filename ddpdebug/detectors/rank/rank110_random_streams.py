"""RANK110: all ranks draw the same random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.kinds import (
    Examples,
    Facts,
    Finding,
    Findings,
    Severity,
    Step,
    Streak,
    StreakRule,
    Threshold,
)
from ddpdebug.schema import announcements
from ddpdebug.schema.row import Flag

#: Functions that draw one number for each row of what they return; others draw from as many as there are.
_BY_ROW = frozenset({"randint", "integers", "randrange", "random_integers", "random_", "getrandbits"})
_PLACES = {
    "loop": "between the model's forwards",
    "loading": "while a batch was made",
    "forward": "in the model's forward",
}


def _alike(number: int, **fields: Any) -> Step:
    return step_at(number, flags=Flag.RNG_USED_IN_FORWARD, rng_digest=digest(7, number), **fields)


def _told(  # noqa: PLR0913 - one for each field
    rank: int,
    *,
    state: str = "a1",
    numbers: int | None = 700,
    place: str = "loop",
    generator: str = "torch",
    loaded: bool = True,
    calls: tuple[tuple[str, bool], ...] = (("randn_like", False),),
    level: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return what a rank tells of its draws for a batch of 32 samples; `level`: of a second input, one for each."""
    inputs = [{"digest": f"b{rank}", "rows": 32, "elements": 256, "changed": True}]
    inputs += [] if level is None else [{"digest": level, "rows": 32, "elements": 32, "changed": True}]
    family = generator.partition(" ")[0].partition(":")[0].replace("cuda", "torch")
    return {
        "step": 15,
        "draws": [{"place": place, "generator": generator, "state": state, "numbers": numbers, "steps": 16}],
        "inputs": inputs,
        "loaded": loaded,
        "calls": [
            {"location": "train.py:9", "function": name, "family": family, "chooses": chooses}
            for name, chooses in calls
        ],
        **more,
    }


def _facts(**fields: Any) -> Facts:
    return Facts(topic="draws", values={rank: _told(rank, **fields) for rank in range(2)})


def _calls(generator: str, fact: announcements.RandomDraws) -> list[announcements.DrawingLine]:
    """Return the calls that may draw from a generator."""
    name = generator.partition(" ")[0]
    others = {"random", "numpy", *(d.generator.partition(" ")[0] for d in fact.draws if " " in d.generator)}
    own = {name} if name in others else {line.family for line in fact.calls} - others
    return [line for line in fact.calls if line.family in own]


def _is_computed_with(calls: list[announcements.DrawingLine], numbers: int | None) -> bool:
    """Whether calls draw what is computed with, and not the order of samples, whose numbers nobody knows."""
    values = any(not line.chooses for line in calls)
    return values and (numbers is not None or all(line.function in _BY_ROW or not line.chooses for line in calls))


def _beside_rows(draws: announcements.Draws, fact: announcements.RandomDraws, samples: int) -> int | None:
    """Return how many numbers are drawn for something else than the rows of a batch that no DataLoader has made."""
    choosing = [line for line in _calls(draws.generator, fact) if line.chooses]
    if fact.loaded or not choosing or draws.numbers is None:
        return draws.numbers
    known = all(line.function in _BY_ROW for line in choosing)
    return max(0, draws.numbers - samples * len(choosing)) if known else None


class RandomStreams(StreakRule):
    """Several ranks draw the same random numbers for different batches: in their forwards, or in the training loop.

    A `warning` where the loop draws at least one number for each sample and the numbers are computed with: noise, time
    steps, masks, mixing. An `info` where that is not known, where they are drawn as samples are loaded, and for dropout
    in the model, whose masks are averaged over many steps. A few numbers in a step are taken for a decision that the
    ranks share on purpose, and nothing is said.

    Impact: identical streams correlate the noise of the ranks, so that averaging over ranks removes less of it than
    the world size suggests; nothing fails. Draws that must be shared and are not (the same sub-network, the same
    negatives, a shuffle of one common list) make the ranks compute different things.

    Diagnosis: on every rank print `torch.initial_seed()` and the sum of one dropout mask in the named step, then
    `torch.utils.data.get_worker_info().seed` from inside `__getitem__`. Equal values at equal worker ids mean that
    the loaders took their base seed from identically seeded generators. Compare the seeding lines with the place
    where rank is first known.

    Causes:
    - one `torch.manual_seed(seed)` for all ranks, needed for equal initial weights and never changed afterwards
    - one `numpy.random.seed(seed)` or `random.seed(seed)` for all ranks, beside a torch seed with the rank
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
    title = "all ranks draw the same random numbers"
    same_random_steps = enough = Threshold(
        16,
        "checked steps in a row in which all ranks drew alike",
        source="a decision that ranks share on purpose is drawn now and then",
    )
    drawn_least = Threshold(
        4, "numbers in a step that may belong to its samples, however few these are", source="as for 8 samples"
    )
    drawn_most = Threshold(
        32,
        "numbers in a step that are many, however large the batch",
        source="what a Mersenne twister shows of many draws is a number below 1,248, and below 32 once in 800",
    )
    drawn_per_sample = Threshold(
        0.5,
        "numbers per sample in a step, below which ranks may share them on purpose",
        source="an order of the batch (mixup) is one number for each sample but one",
    )
    fires_on = Examples(
        lambda: tuple(_alike(n) for n in range(16)),
        lambda: (*steps(3), *(_alike(n) for n in range(3, 19))),
        _facts,
        lambda: _facts(generator="numpy", numbers=32),
        lambda: _facts(generator="cuda:0", numbers=None),
        lambda: _facts(numbers=32, loaded=False, calls=(), level="c1"),  # the model is given the same time steps
        lambda: _facts(numbers=31, calls=(("randperm", True),)),  # an order of the batch
        lambda: _facts(place="loading", generator="random", numbers=64),
    )
    silent_on = Examples(
        lambda: steps(16, flags=Flag.RNG_USED_IN_FORWARD),
        lambda: tuple(_alike(n) for n in range(15)),
        lambda: tuple(step_at(n, rng_digest=digest(7, n)) for n in range(16)),  # nothing is drawn in forward
        lambda: tuple(_alike(n, batch_digest=digest(8, n)) for n in range(16)),  # stages that share their batch
        lambda: Facts(topic="draws", values={r: _told(r, state=f"a{r}") for r in range(2)}),  # seeds with the rank
        lambda: Facts(topic="draws", values={r: _told(0) for r in range(2)}),  # the same batch: nothing to tell apart
        lambda: _facts(numbers=2),  # the size of this step's images
        lambda: _facts(numbers=12, calls=(("random", False),)),  # which of twelve layers are left out
        lambda: _facts(generator="gen (torch)"),  # a generator of its own for what is shared
        lambda: _facts(loaded=False, calls=(("randint", True),), numbers=32),  # rows of its own shard
        lambda: _facts(loaded=False, calls=(("randint", True), ("rand", False)), numbers=36),  # and four decisions
        lambda: Facts(topic="draws", values={0: _told(0), 1: _told(1, step=63)}),
    )

    reads = ("rng_digest",)
    of_several = True
    topics = ("draws",)

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
        first, ranks = streaks["state"].first, tuple(sorted(step.everyone))
        phase = "forward"
        yield self.finding(step, severity=Severity.INFO, step=first, ranks=ranks, phase=phase, evidence=evidence)

    def compare(self, topic: str, facts: Mapping[int, announcements.RandomDraws]) -> Findings:
        told = dict(sorted(facts.items()))
        some = next(iter(told.values()))
        if len(told) < 2 or len({fact.step for fact in told.values()}) > 1:
            return
        if len({tuple(given.digest for given in fact.inputs) for fact in told.values()}) < 2:
            return  # one batch for all
        alike = [draws for draws in some.draws if self._is_alike(draws, told)]
        for place in _PLACES:
            if drawn := [draws for draws in alike if draws.place == place]:
                finding = self._judge(place, drawn, told)
                if finding is not None:
                    yield finding

    def _is_alike(self, draws: announcements.Draws, told: Mapping[int, announcements.RandomDraws]) -> bool:
        """Whether all ranks have drawn it from generators in the same state, for long enough."""
        if (draws.place, draws.generator) == ("forward", "torch"):
            return False  # the rows show it
        return all(
            any(
                (own.place, own.generator, own.state) == (draws.place, draws.generator, draws.state)
                and own.steps >= self.same_random_steps
                for own in fact.draws
            )
            for fact in told.values()
        )

    def _judge(
        self, place: str, drawn: list[announcements.Draws], told: Mapping[int, announcements.RandomDraws]
    ) -> Finding | None:
        samples = min(max(fact.inputs, key=lambda given: given.elements).rows for fact in told.values())
        given = self._given_alike(told, samples) if place == "loop" else None
        # a generator of its own, with one seed, is how a shared decision is drawn
        counted = [draws for draws in drawn if given is not None or not draws.generator.endswith("(torch)")]
        least_of_all = min(max(self.drawn_least, samples), self.drawn_most)
        fact = told[min(told)]
        if place == "loop" and given is None:
            counted = [replace(draws, numbers=_beside_rows(draws, fact, samples)) for draws in counted]
        least = min(self.drawn_per_sample * samples, self.drawn_most)
        counted = [draws for draws in counted if draws.numbers is None or draws.numbers >= max(self.drawn_least, least)]
        if not counted:
            return None
        lines_of = {draws.generator: _calls(draws.generator, fact) for draws in counted}
        enough = [draws for draws in counted if draws.numbers is None or draws.numbers >= least_of_all]
        computed = [draws for draws in enough if _is_computed_with(lines_of[draws.generator], draws.numbers)]
        certain = place == "loop" and (given is not None or bool(computed))
        calls = dict.fromkeys(line for draws in counted for line in lines_of[draws.generator])
        lines = [f"{line.location} {line.function}" for line in calls]
        return self.finding(
            severity=Severity.WARNING if certain else Severity.INFO,
            step=max(0, (fact.step or 0) - min(draws.steps for draws in counted) + 1),
            last_step=fact.step,
            ranks=tuple(told),
            subject=tuple(draws.generator for draws in counted),
            phase=place,
            location=lines[0].rpartition(" ")[0] if len(lines) == 1 and place == "loop" else None,
            evidence={
                "observed": f"{_PLACES[place]} the ranks drew the same numbers, for different inputs",
                "numbers_at_least": {draws.generator: draws.numbers for draws in counted},
                "samples": samples,
                **({} if given is None else {"equal_input": f"tensor {given} of what the model was given"}),
                **({"calls": lines} if lines and place == "loop" else {}),
            },
        )

    def _given_alike(self, told: Mapping[int, announcements.RandomDraws], samples: int) -> int | None:
        """Return which input is new in each step, has a value for each sample and is the same on all ranks."""
        for index, column in enumerate(zip(*(fact.inputs for fact in told.values()), strict=False)):
            new = all(given.changed and given.rows == samples > 1 for given in column)
            if new and len({given.digest for given in column}) == 1:
                return index
        return None
