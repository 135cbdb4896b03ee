"""RANK108: one rank's loss is unlike the others' for a long time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpdebug.detectors.comparison import median_without
from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.hlth.curve import sample_noise
from ddpdebug.detectors.kinds import Examples, Facts, Fields, Findings, Severity, Step, Streak, StreakRule, Threshold
from ddpdebug.schema.announcements import Loader, Targets
from ddpdebug.schema.robust import spread
from ddpdebug.schema.row import Flag

#: The window is judged every so many steps.
_EVERY = 10
_LOOSE = Flag.LOCAL_ONLY | Flag.IN_JOIN
#: Where the norms before and after the reduction are not those of one gradient.
_UNFIT = (
    *(Flag.LOCAL_ONLY, Flag.IN_JOIN, Flag.NO_DDP, Flag.BYPASS, Flag.SKIPPED, Flag.UNSYNCED_BACKWARD, Flag.CLOSURE),
    *(Flag.CLIPPED_BEFORE_SYNC, Flag.CUSTOM_REDUCTION, Flag.GRADS_CARRIED, Flag.GRADS_WRITTEN),
)
_SHOWN = 16


@dataclass(frozen=True, slots=True)
class _Losses:
    step: int
    losses: Mapping[int, float]  # of all ranks, or of the chosen ones
    usual: float  # the mean of all ranks without the highest and the lowest
    chosen: bool


@dataclass(frozen=True, slots=True)
class _Outlier:
    rank: int
    z: float
    excess: float


def _targets(*counts: tuple[int, ...]) -> Facts:
    """Return what ranks tell of their labels."""
    told = {"loss": "NllLoss", "reads": 16, "numbers": []}
    size = max(len(own) for own in counts)
    values = {
        rank: {**told, "seen": sum(own), "classes": size, "counts": [*own, *[0] * (size - len(own))]}
        for rank, own in enumerate(counts)
    }
    return Facts(topic="targets", values=values)


def _two(count: int, more: float | Callable[[int], float], since: int) -> tuple[Step, ...]:
    """Return steps of two ranks, of which one has a larger loss since one of them."""
    larger = more if callable(more) else lambda _: more
    losses = [[1.0 + 0.1 * sample_noise(i + 70 * rank) + larger(i) * (rank == 1 and i >= since) for rank in range(2)]
              for i in range(count)]  # fmt: skip
    return tuple(step_at(i, world=2, odd={r: {"loss": own[r]} for r in range(2)}) for i, own in enumerate(losses))


class LossOutlier(StreakRule):
    """One rank's loss lies far from its peers' over a long window, well beyond the noise and the peers' own spread.

    Or its labels show it. Phase `labels`: they are as frequent as those of the others once one is added or subtracted.
    Phase `gradients`: the ranks have each label about as often, and their gradients contradict each other in most
    steps, as large as at the start: what is right for one is wrong for another. Phase `parted`: the losses of two ranks
    were alike and have parted within a few steps. Where two ranks disagree nobody can tell who is right, and both are
    named.

    Impact: often none: shards differ. But broken labels, another tokenizer or unnormalised inputs on one rank look
    just like this, and pull the average gradient in a wrong direction.

    Diagnosis: `deviations_from_the_median` is the median distance to the peers' median loss, in units of its noise.
    Look at twenty samples of this rank with their labels, and compare the class frequencies and the input's mean and
    standard deviation with another rank's.

    Causes:
    - `offset`: numbers of classes that begin at 1 on one rank and at 0 on the others, or in another order
    - labels that do not belong to the inputs on this rank (shifted file, other class order, stale cache)
    - `parted`: a cache by the number of the batch, a shard that has ended, an epoch that only one rank shuffles
    - other preprocessing: normalisation left out, other vocabulary, other crop
    - a shard that really is harder or easier, which is no mistake
    - this rank computes the loss differently (weights, label smoothing, reduction)

    Remedy:
    - `offset`: number classes once, from one sorted list, for all ranks
    - hash the label file and the preprocessing configuration on each rank and compare
    - shuffle before sharding, so that shards are alike
    - if the shard is meant to differ, leave it: nothing is wrong with the synchronisation
    """

    code = "RANK108"
    severity = Severity.WARNING
    title = "one rank's loss is an outlier"
    incident = ("ranks", "phase")
    of_several = True
    topics = ("targets", "loader")
    contrary_alone = Threshold(
        1.5,
        "norm of one rank's own gradient over the next largest, to be the odd one of three and more",
        source="calculated: where n - 1 ranks pull against one, its gradient is n - 1 times as large as theirs",
    )
    contrary_first = Threshold(4, "steps whose gradients are the first ones", source="as `level_steps`")
    contrary_least = Threshold(
        0.25,
        "median norm of own gradients as a share of the first ones, below which they may contradict",
        source="chosen: at the optimum of all, the gradients of parts of one data set cancel, and are small",
    )
    contrary_labels = Threshold(
        3,
        "standard deviations of chi-square up to which two ranks' labels have one distribution",
        source="three standard deviations of a normal distribution are passed once in 700",
    )
    contrary_share = Threshold(
        0.6,
        "squared norm of the mean gradient times the ranks, over the mean squared norm",
        source="1 for gradients that have nothing in common, more for those that agree; of two ranks 0.6 is a cosine "
        "of -0.4",
    )
    contrary_data = Threshold(
        0.25,
        "share of the data set in one step, above which gradients are not compared",
        source="calculated: what is not on one rank is then on the other, so near the optimum the gradients of two "
        "ranks have a cosine of -s / (2 - s): -0.14 for a quarter, -1 for the whole",
    )
    contrary_steps = Threshold(
        32,
        "steps of which half must show it",
        source="with a share of one half by chance 16 of 32 are common, so the "
        "median decides, and the noise of one step does not",
    )
    labels_each = Threshold(
        10, "labels for each class that occurs, below which two ranks are not compared", source="chi-square asks for 5"
    )
    labels_far = Threshold(
        6,
        "standard deviations of chi-square from which on two ranks' labels have two distributions",
        source="twice `contrary_labels`",
    )
    labels_overlap = Threshold(
        0.5,
        "least share of labels that two ranks with an offset have in common",
        source="ranks that hold classes of their own, such as the even and the odd ones, have none in common",
    )
    outlier_in_a_row = enough = Threshold(
        3, "judgements in a row that a rank must look odd in", source="with one every ten steps, thirty further steps"
    )
    outlier_least = Threshold(
        20, "steps that must be there", source="the median of twenty is known to 0.28 standard deviations"
    )
    outlier_ranks = Threshold(3, "ranks below which there is no majority", source="of two, either may be the odd one")
    outlier_same_side = Threshold(
        0.95,
        "share of steps in which the rank lies on the same side of its peers",
        source="chosen: 48 of 50 coins on one side come once in 1e12",
    )
    outlier_share = Threshold(
        0.25,
        "distance from the peers as a share of their loss",
        source="chosen: shards of different difficulty differ by less",
    )
    outlier_window = Threshold(50, "steps that are looked at together", source="chosen: five judgements")
    outlier_z = Threshold(
        6,
        "distance from the peers over the noise and the spread between them",
        source="wider than 3.5 deviations (Iglewicz, Hoaglin 1993): shards differ as well",
    )
    fires_on = Examples(
        lambda: steps(60, odd={3: {"loss": 2.3}}),
        lambda: steps(60, world=3, odd={0: {"loss": 0.02}}),
        lambda: _two(90, 1.0, since=32),
        lambda: _targets((0, 90, 60, 40, 20, 10), (0, 0, 90, 60, 40, 20, 10)),  # counted from 2
        lambda: _targets((300,) * 5 + (0,), (0,) + (300,) * 5),
        lambda: (_targets((60,) * 4, (61, 58, 62, 59)), *steps(40, world=2, local_grad_norm=1.0, grad_norm=0.4)),
        lambda: (
            Facts(topic="loader:0", values={rank: {"length": 640, "batches": 8} for rank in range(2)}),
            _targets((60,) * 4, (61, 58, 62, 59)),
            *steps(40, world=2, local_grad_norm=1.0, grad_norm=0.4),
        ),
    )
    silent_on = Examples(
        lambda: steps(80),
        lambda: steps(40, world=2, odd={1: {"loss": 9.0}}),
        lambda: steps(39, odd={3: {"loss": 2.3}}),
        lambda: _two(90, 1.0, since=0),
        lambda: _two(90, 0.1, since=32),
        lambda: _two(400, lambda i: 1.2 * (1 - math.exp(-i / 100)), since=0),  # domains that are learned at other paces
        lambda: tuple(step_at(n, odd={1: {"loss": 5.0}} if n % 7 == 0 else {}) for n in range(80)),
        lambda: _targets((90, 60, 40, 20), (88, 63, 41, 18)),
        lambda: _targets((90, 0, 90, 0, 90, 0), (0, 90, 0, 90, 0, 90)),  # shards by class
        lambda: _targets((90, 60, 40, 20), (20, 90, 10, 60)),  # shards that differ
        lambda: (_targets((60,) * 4, (61, 58, 62, 59)), *steps(40, world=2, local_grad_norm=1.0, grad_norm=0.7)),
        lambda: (_targets((90, 20), (20, 90)), *steps(40, world=2, local_grad_norm=1.0, grad_norm=0.4)),
        lambda: (  # single samples of three classes, a third of them of the same one
            _targets((60,) * 3, (61, 58, 62)),
            *(step_at(n, world=2, local_grad_norm=1.0, grad_norm=0.5 if n % 3 else 1.0) for n in range(40)),
        ),
        lambda: (  # each step sees half of a small data set
            Facts(topic="loader:0", values={rank: {"length": 160, "batches": 2} for rank in range(2)}),
            _targets((60,) * 4, (61, 58, 62, 59)),
            *steps(40, world=2, local_grad_norm=1.0, grad_norm=0.4),
        ),
        lambda: (  # so does each step of a loop that has its batches in a list
            _targets((60,) * 4, (61, 58, 62, 59)),
            *(
                step_at(n, world=2, local_grad_norm=1.0, grad_norm=0.4, batch_digest=digest(7, n % 3))
                for n in range(40)
            ),
        ),
        lambda: (
            _targets((60,) * 4, (61, 58, 62, 59)),  # one batch again and again, at its optimum
            *steps(40, world=2, local_grad_norm=1.0, grad_norm=0.4, batch_digest=digest(7)),
        ),
        lambda: steps(80, odd={0: {"loss": 1.0}, 1: {"loss": 1.3}, 2: {"loss": 1.6}, 3: {"loss": 2.0}}),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._windows: dict[int, deque[_Losses]] = {}
        self._counts: dict[int, int] = {}
        self._outliers: dict[int, _Outlier] = {}  # of the window that was judged last
        self._alike: bool | None = None  # the ranks have each label about as often
        self._pulls: dict[int, deque[tuple[float, float]]] = {}  # share of the mean, and the ranks' mean norm
        self._first_norms: dict[int, list[float]] = {}
        self._batches: dict[int, deque[int]] = {}  # digests of the newest ones
        self._epochs: dict[str, int] = {}  # loader -> batches of an epoch
        self._said: set[str] = set()
        self._pairs: dict[int, deque[tuple[int, float, float]]] = {}  # optimizer -> step and losses, of two ranks

    # --- labels and gradients -----------------------------------------------------------------------------------------

    def detect(self, step: Step) -> Findings:
        yield from super().detect(step)
        yield from self._contradiction(step)
        yield from self._part(step)

    def compare(self, topic: str, facts: Mapping[int, Targets | Loader]) -> Findings:
        loaders = [fact.batches for fact in facts.values() if isinstance(fact, Loader)]
        if loaders:
            self._epochs[topic] = min((batches for batches in loaders if batches is not None), default=0)
            return
        yield from self._labels({rank: fact for rank, fact in sorted(facts.items()) if isinstance(fact, Targets)})

    def _labels(self, facts: Mapping[int, Targets]) -> Findings:
        """Compare how often the ranks have each label."""
        counts = {rank: fact.counts for rank, fact in facts.items()}
        least = min(sum(own) / max(1, sum(n > 0 for n in own)) for own in counts.values())
        # a rank's own samples, all of them in each step: theirs is the difference, and at the optimum they pull apart
        whole = not self._epochs and any(fact.whole for fact in facts.values())
        if whole or len(counts) < 2 or len({len(own) for own in counts.values()}) > 1 or least < self.labels_each:
            self._alike = None
            return
        ranks = list(counts)
        apart = {(a, b): _chi(counts[a], counts[b]) for a in ranks for b in ranks if a < b}
        self._alike = all(value <= self.contrary_labels for value in apart.values())
        for offset in (1, -1):
            odd = [
                rank
                for rank in ranks
                if 2 * sum(self._is_moved(counts[other], counts[rank], offset) for other in ranks if other != rank)
                > len(ranks) - 1
            ]
            if len(odd) == 1 and "labels" not in self._said:
                rank = odd[0]
                others = next(other for other in ranks if other != rank)
                if len(ranks) == 2:  # the other one may be moved back as well
                    odd = ranks if counts[others][0] and counts[rank][0] else [r for r in ranks if not counts[r][0]]
                self._said.add("labels")
                yield self.finding(
                    step=0,
                    last_step=max((fact.step or 0) for fact in facts.values()),
                    ranks=tuple(odd or ranks),
                    subject=("labels",),
                    phase="labels",
                    title="one rank's labels are those of the others, moved by one",
                    evidence={
                        "offset": f"rank {rank} {offset:+d}",
                        "labels": {str(r): sum(own) for r, own in counts.items()},
                        "counts": {str(r): list(own[:_SHOWN]) for r, own in counts.items()},
                    },
                )

    def _is_moved(self, usual: Sequence[int], own: Sequence[int], offset: int) -> bool:
        """Whether labels are as frequent as others, but for an offset."""
        moved = [usual[(index - offset) % len(usual)] for index in range(len(usual))]
        common = sum(min(a / sum(usual), b / sum(own)) for a, b in zip(usual, own, strict=True))
        present = sum(n > 0 for n in usual)
        far = _chi(usual, own) >= self.labels_far and _chi(moved, own) <= self.contrary_labels
        return far and present > 2 and common >= self.labels_overlap

    def _contradiction(self, step: Step) -> Findings:
        """The gradients of ranks whose labels are of one distribution, and that pull against each other."""
        local = [row.local_grad_norm for row in step.rows.values()]
        mean = next(iter(step.rows.values())).grad_norm if step.rows else math.nan
        count, squares = step.total("squares")
        known = math.isfinite(mean) and count == step.world > 1 and squares > 0
        batch = next(iter(step.rows.values())).batch_digest if step.rows else 0
        batches = self._batches.setdefault(step.optimizer, deque(maxlen=max(1, int(1 / self.contrary_data) - 1)))
        again = batch in batches
        batches.append(batch)
        if not known or again or self._covers_much(step) or any(step.any(flag) for flag in _UNFIT):
            return
        first = self._first_norms.setdefault(step.optimizer, [])
        if len(first) < self.contrary_first:
            first.append(math.sqrt(squares / count))
        pulls = self._pulls.setdefault(step.optimizer, deque(maxlen=int(self.contrary_steps)))
        pulls.append((count * count * mean * mean / squares, math.sqrt(squares / count)))
        if not self._alike or len(pulls) < self.contrary_steps or "gradients" in self._said:
            return
        # the mean too: of single samples most pairs pull against each other, and those of one class agree all the more
        shares = [share for share, _ in pulls]
        share = max(statistics.median(shares), statistics.fmean(shares))
        size = statistics.median(norm for _, norm in pulls) / (statistics.median(first) or 1.0)
        if share > self.contrary_share or size < self.contrary_least:
            return
        self._said.add("gradients")
        largest = max(step.rows, key=lambda rank: step.rows[rank].local_grad_norm)
        second = sorted(local)[-2]
        alone = count > 2 and step.rows[largest].local_grad_norm > self.contrary_alone * second
        yield self.finding(
            step,
            step=step.step - int(self.contrary_steps) + 1,
            ranks=(largest,) if alone else tuple(sorted(step.everyone)),
            subject=("gradients",),
            phase="gradients",
            title="the ranks' gradients contradict each other although their labels are alike",
            evidence={
                "mean_gradient_over_own": share,
                "cosine_between_ranks": share - 1 if count == 2 else None,
                "norm_over_first": size,
                "steps": len(pulls),
            },
        )

    def _part(self, step: Step) -> Findings:
        """Of two ranks the losses that were alike and have parted: which of them is wrong, nobody can tell."""
        losses = [row.loss for _, row in sorted(step.rows.items())]
        if step.world != 2 or not step.complete or step.any(_LOOSE) or not all(map(math.isfinite, losses)):
            return
        least = int(self.outlier_least)
        pairs = self._pairs.setdefault(step.optimizer, deque(maxlen=least + int(self.outlier_window)))
        pairs.append((step.step, losses[0], losses[1]))
        if len(pairs) < 2 * least or "parted" in self._said:
            return
        levels = [statistics.median(pair[rank] for pair in list(pairs)[-least:]) for rank in (1, 2)]
        middle = statistics.median(b - a for _, a, b in list(pairs)[-least:])
        apart = len(
            list(itertools.takewhile(lambda pair: 2 * (pair[2] - pair[1]) * middle > middle**2, reversed(pairs)))
        )
        before = [b - a for _, a, b in list(pairs)[-apart - least : -apart]] if apart >= least else []
        if len(before) < least:  # they have drifted apart from the start, as on data that differ
            return
        noise = max(spread(before), 1e-3 * max(levels), 1e-12)
        far = abs(middle) >= self.outlier_z * noise and abs(middle) >= self.outlier_share * min(levels)
        if far and abs(statistics.median(before)) <= noise:
            self._said.add("parted")
            since = pairs[-apart][0]
            yield self.finding(
                step,
                step=since,
                ranks=(0, 1),
                subject=("loss",),
                phase="parted",
                title="the losses of two ranks were alike and have parted",
                evidence={
                    "deviations_of_the_difference": middle / noise,
                    "median_loss": {str(rank): level for rank, level in enumerate(levels)},
                },
            )

    def _covers_much(self, step: Step) -> bool:
        """Whether one step takes a large part of what the longest loader delivers in an epoch."""
        batches = max(self._epochs.values(), default=0)
        each = max(1, *(row.micro_batches for row in step.rows.values()))
        return 0 < batches * self.contrary_data < each

    # --- the loss -----------------------------------------------------------------------------------------------------

    def can_show(self, step: Step) -> bool:
        return self._counts.get(step.optimizer, 0) % _EVERY == 0

    def shown(self, step: Step) -> Mapping[int, bool] | None:
        losses = {rank: row.loss for rank, row in step.rows.items() if math.isfinite(row.loss)}
        everybody = step.complete and len(losses) == len(step.rows) and step.mean_loss is not None
        count, total = step.total("loss")
        if not everybody or count < self.outlier_ranks or step.any(_LOOSE):
            return None
        window = self._windows.setdefault(step.optimizer, deque(maxlen=int(self.outlier_window)))
        lowest, highest = min(losses.values()), max(losses.values())
        window.append(_Losses(step.step, losses, (total - lowest - highest) / max(1, count - 2), step.chosen))
        self._counts[step.optimizer] = self._counts.get(step.optimizer, 0) + 1
        if self._counts[step.optimizer] % _EVERY or len(window) < self.outlier_least:
            return None
        apart = self._first(window) if any(each.chosen for each in window) else self._apart([w.losses for w in window])
        self._outliers = {outlier.rank: outlier for outlier in apart}
        return {rank: rank in self._outliers for rank in {*_ranks(window), *self._outliers}}

    def report(self, step: Step, streaks: Mapping[int, Streak]) -> Findings:
        window = self._windows[step.optimizer]
        ranks = sorted({*_ranks(window), *streaks})
        medians = {str(r): statistics.median(w.losses[r] for w in window if r in w.losses) for r in ranks}
        for rank in streaks:
            z, excess = self._outliers[rank].z, self._outliers[rank].excess
            yield self.finding(
                step,
                step=window[0].step,
                ranks=(rank,),
                subject=("loss",),
                evidence={
                    "deviations_from_the_median": z,
                    "excess": excess,
                    "window": len(window),
                    "median_loss": medians,
                },
            )

    def _apart(self, window: Sequence[Mapping[int, float]]) -> Iterator[_Outlier]:
        ranks = sorted(window[-1])
        apart: dict[int, list[float]] = {rank: [] for rank in ranks}
        levels = []
        for losses in window:
            values = sorted(losses.values())
            levels.append(statistics.median(values))
            for rank in ranks:
                apart[rank].append(losses[rank] - median_without(values, losses[rank]))
        middle = {rank: statistics.median(values) for rank, values in apart.items()}
        noise = statistics.median(spread(values) for values in apart.values())
        level = abs(statistics.median(levels))
        for rank in ranks:
            scale = max(noise, spread([middle[other] for other in ranks if other != rank]), 1e-3 * level, 1e-12)
            z = middle[rank] / scale
            peers = abs(statistics.median(statistics.median(w[o] for w in window) for o in ranks if o != rank))
            side = sum(value * middle[rank] > 0 for value in apart[rank])
            far = abs(z) >= self.outlier_z and abs(middle[rank]) >= self.outlier_share * peers
            if far and side >= self.outlier_same_side * len(window):
                yield _Outlier(rank, z, middle[rank])

    def _first(self, window: Collection[_Losses]) -> Iterator[_Outlier]:
        """Judge chosen rows: an odd rank has the highest loss of all, or the lowest, nearly always."""
        level = abs(statistics.median(each.usual for each in window))
        for pick, opposite in ((max, min), (min, max)):
            firsts = Counter(pick(each.losses, key=each.losses.__getitem__) for each in window)
            ((rank, times),) = firsts.most_common(1)
            if times < self.outlier_same_side * len(window):
                continue
            middle = statistics.median(each.losses[rank] - each.usual for each in window if rank in each.losses)
            others = [other for other in _ranks(window) if other != rank]
            noises = [spread([each.losses[other] - each.usual for each in window]) for other in others]
            # of a thousand ranks with noise alone the first is three deviations away, on both sides
            apart = statistics.median(abs(opposite(each.losses.values()) - each.usual) for each in window) / 3
            scale = max(statistics.median(noises) if noises else 0.0, apart, 1e-3 * level, 1e-12)
            if abs(middle) >= max(self.outlier_z * scale, self.outlier_share * level):
                yield _Outlier(rank, middle / scale, middle)


def _ranks(window: Collection[_Losses]) -> list[int]:
    """Return the ranks whose losses are known in all steps: of very many the first and the last, and odd ones."""
    return sorted(frozenset.intersection(*(frozenset(each.losses) for each in window)))


def _chi(one: Sequence[int], other: Sequence[int]) -> float:
    """Return by how many standard deviations chi-square of two samples lies above what one distribution gives."""
    a, b = sum(one), sum(other)
    pairs = [(x, y) for x, y in zip(one, other, strict=True) if x + y]
    free = max(1, len(pairs) - 1)
    chi = math.fsum((x * math.sqrt(b / a) - y * math.sqrt(a / b)) ** 2 / (x + y) for x, y in pairs)
    return (chi - free) / math.sqrt(2 * free)
