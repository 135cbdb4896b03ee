"""SLOW603: the step time regressed against the run's own baseline."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpdebug.detectors.kinds import Examples, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.detectors.slow.timing import PaceRule, Timing, duration, job, per_step
from ddpdebug.schema.pace import PHASES
from ddpdebug.schema.robust import middle, spread

_COMMUNICATION = "communication"
#: Levels that are remembered; when there are more, every second one goes.
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Level:
    """The pace of a window: medians over its blocks, for one step."""

    step: int
    seconds: float  # of the median rank, and of moving data where nobody waits
    phases: Mapping[str, float]
    cpu: float
    elements: float
    course: tuple[tuple[int, float], ...] = ()  # step and seconds of its blocks
    work: Mapping[int, _Facts] = field(default_factory=dict)  # optimizer that steps in most blocks -> what it does


#: Micro-batches, in the median; parameters without a gradient, and the digest of which have one, where all steps agree.
_Facts = tuple[int | None, int | None, int | None]


@dataclass(slots=True)
class _Series:
    blocks: list[Timing] = field(default_factory=list)  # of the window that fills
    before: list[Level] = field(default_factory=list)  # what the run's pace has been
    newest: deque[Level] = field(default_factory=deque)  # not yet part of that
    sum: float = 0.0  # of CUSUM
    base: Level | None = None  # while it is slower: the pace before
    slower: bool = False  # the newest windows all are
    said: Finding | None = None
    clear: int = 0  # windows in a row that are no longer slower


class SlowdownOverTime(PaceRule):
    """Steps since the named one take persistently longer than the run's earlier steps, for the same number of elements.

    The pace is that of the median rank, without waiting for slower ones and without what ddpdebug takes; evaluations
    and checkpoints in a part of the steps do not move it. Where other parameters have gradients than before (layers
    were unfrozen), a step has another number of micro-batches, or other optimizers step, a new pace begins. `phase` is
    what covers most of the change: one of a rank's own or `communication`. Where all phases are slower and take no more
    processor time the whole machine is slower: that is information.

    Impact: the run needs more time than planned; a ratio that grows further often precedes a hang or an out-of-memory
    error.

    Diagnosis: separate a jump from a drift. A jump: what happened at that step (epoch, evaluation, checkpoint, node
    event, schedule of sequence length). A drift: something accumulates. Compare the phases before and after, the
    shapes, and the allocator's retries; look at whether all ranks or one slowed down (SLOW601).

    Causes:
    - something that accumulates: lists, hooks registered again, kept graphs, growing caches, garbage collection
    - recompilation by `torch.compile` for new shapes
    - inputs that cost more for each element: longer sequences under attention, a harder shard
    - throttling, a noisy neighbour, slower storage
    - allocator retries near the memory limit

    Remedy:
    - remove what accumulates (MEM402, MEM403, MEM406)
    - for recompilation run with `TORCH_LOGS=recompiles` and pad to fixed shapes or mark dynamic dimensions
    - profile three steps before and after with `torch.profiler.profile` and compare
    - restart from a checkpoint: if speed returns, it is state in the process; if it does not, it is data or hardware
    """

    code = "SLOW603"
    severity = Severity.WARNING
    title = "step time regressed against the run's own baseline"
    incident = ()
    pace_warm_up, pace_block = PaceRule.pace_warm_up, PaceRule.pace_block
    slowdown_window = Threshold(32, "blocks whose median is one value of the pace", source="half of `pace_window`")
    slowdown_share = Threshold(
        0.15, "by which a window's steps take longer than those before", source="chosen: above what hours of a day do"
    )
    slowdown_windows = Threshold(
        3, "windows in a row that show it", source="about 100 steps: longer than a pass over validation data"
    )
    slowdown_windows_machine = Threshold(
        8, "the same where the whole machine is slower", source="chosen: neighbours come and go"
    )
    slowdown_baseline = Threshold(
        5, "windows that make a baseline", source="chosen: fewer do not show how much the pace varies by itself"
    )
    slowdown_drift = Threshold(
        0.5, "standard deviations of the windows' pace that CUSUM takes off each", source="usual: half the shift sought"
    )
    slowdown_sum = Threshold(
        8, "what CUSUM has to reach, in standard deviations",
        source="of normal noise one run of 10,000 windows does by chance (Siegmund's approximation)",
    )  # fmt: skip
    slowdown_noise = Threshold(
        0.03, "the least standard deviation, as a share of the pace", source="chosen: that of a quiet machine is below"
    )
    slowdown_over = Threshold(
        0.05, "by which steps may take longer when it is over", source="a third of what begins it"
    )
    slowdown_phase = Threshold(
        0.6, "share of the change in one phase, where the machine is not slower",
        source="as `straggler_phase`",
    )  # fmt: skip
    slowdown_alone = Threshold(
        0.5, "share of that phase's ratio by which the rest may be slower as well",
        source="measured: beside other jobs all phases are slower by about the same ratio",
    )  # fmt: skip
    slowdown_slice = Threshold(
        0.01, "seconds by which communication alone may grow",
        source="a time slice: ranks that share processors wake up late, and steps of 10 ms then take 12",
    )  # fmt: skip

    fires_on = Examples(
        lambda: job(480, more=lambda step, rank, phase: 0.02 * (phase == "forward" and step >= 260)),
        lambda: job(1200, more=lambda step, rank, phase: 3e-5 * step * (phase == "other")),
        lambda: job(480, more=lambda step, rank, phase: 0.02 * (phase == "wait" and step >= 260)),
        lambda: job(  # the whole machine
            640, more=lambda step, rank, phase: 0.01 * (phase in {"forward", "backward", "wait"} and step >= 260)
        ),
    )
    silent_on = Examples(
        lambda: job(600, noise=0.3),
        lambda: job(480, more=lambda step, rank, phase: 0.05 * (phase == "other" and 260 <= step < 300)),
        lambda: job(480, more=lambda step, rank, phase: 0.5 * (phase == "other" and step % 20 == 0 and step > 240)),
        lambda: job(480, more=lambda step, rank, phase: 0.02 * (phase == "forward" and step < 40)),
        lambda: job(  # longer sequences
            480,
            more=lambda step, rank, phase: 0.02 * (phase == "forward" and step >= 260),
            fields=lambda step, rank: {"batch_elements": 1000 + 500 * (step >= 260)},
        ),
        lambda: job(  # layers are unfrozen
            480,
            more=lambda step, rank, phase: 0.02 * (phase == "backward" and step >= 260),
            fields=lambda step, rank: {"presence_digest": (7 + (step >= 260)) * (step % 16 == 0)},
        ),
        lambda: job(  # a full check in each step
            480,
            more=lambda step, rank, phase: 0.02 * (phase == "forward" and step >= 260),
            fields=lambda step, rank: {"overhead_seconds": 0.001 + 0.02 * (step >= 260)},
        ),
        lambda: job(480, fields=lambda step, rank: {"overhead_seconds": 5.0}),  # steps that are short beside that
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._series = _Series()

    def can_show(self, step: Step) -> bool:
        return self._series.base is None

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        return ("machine" in finding.evidence,)

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        return cause.code != "SLOW602" or finding.phase == "data"

    def detect(self, step: Step) -> Findings:
        timing = self.iteration(step)
        block = None if timing is None else self.block(timing)
        if block is None:
            return
        series = self._series
        series.blocks.append(block)
        if len(series.blocks) >= self.slowdown_window:
            level = level_of(series.blocks)
            series.blocks = []
            yield from self._judge(step, series, level)

    def _judge(self, step: Step, series: _Series, level: Level) -> Findings:
        if _is_other_work([*series.before, *series.newest], level):
            series = self._series = _Series()
        series.newest.append(level)
        if series.base is not None:
            yield from self._go_on(step, series, series.base, level)
        elif len(series.before) >= self.slowdown_baseline:
            yield from self._begin(step, series, level)
        kept = int(self.slowdown_windows_machine if series.slower else self.slowdown_windows)
        while len(series.newest) > kept:
            oldest = series.newest.popleft()
            if series.base is None:
                series.before.append(oldest)
        if len(series.before) > _KEPT:
            del series.before[1::2]

    def _begin(self, step: Step, series: _Series, level: Level) -> Findings:
        base, kept = _typical(series.before), int(self.slowdown_windows)
        deviation = max(_deviation(series.before), self.slowdown_noise * base.seconds)
        if not deviation > 0:  # nothing is left of the steps without what ddpdebug takes
            return
        series.sum = max(0.0, series.sum + (level.seconds - base.seconds) / deviation - self.slowdown_drift)
        recent = [*series.newest][-kept:]
        series.slower = len(recent) == kept and min(_ratio(base, one) for one in recent) >= 1 + self.slowdown_share
        if not series.slower or series.sum < self.slowdown_sum:
            return
        found = self._word(step, base, recent, _beginning(series.newest, base))
        if found.severity is self.severity or len(series.newest) >= self.slowdown_windows_machine:
            series.base, series.said, series.clear = base, found, 0
            yield found

    def _go_on(self, step: Step, series: _Series, base: Level, level: Level) -> Findings:
        if _ratio(base, level) >= 1 + self.slowdown_over:
            series.clear = 0
            recent = [*series.newest][-int(self.slowdown_windows) :]
            found = self._word(step, base, recent, series.said.step if series.said else None)
            if series.said and found.severity is series.said.severity:
                yield found
            return
        series.clear += 1
        if series.clear >= self.slowdown_windows:
            series.base, series.sum, series.slower = None, 0.0, False

    def _word(self, step: Step, base: Level, recent: Sequence[Level], begun: int | None) -> Finding:
        after = _typical(recent)
        change = {phase: after.phases[phase] - base.phases[phase] for phase in base.phases}
        ratio = after.seconds / base.seconds
        evidence = {
            "slower": f"{duration(base.seconds)} became {duration(after.seconds)}",
            "ratio": round(ratio, 3),
            "before_seconds": round(base.seconds, 6),
            "after_seconds": round(after.seconds, 6),
            "phases": {phase: round(seconds, 6) for phase, seconds in change.items()},
            "processor_seconds": {"before": round(base.cpu, 6), "after": round(after.cpu, 6)},
        }
        computes = base.cpu > 0 and after.cpu - base.cpu >= self.slowdown_phase * (after.seconds - base.seconds)
        phase = max(change, key=lambda phase: change[phase])
        whole = max(after.seconds - base.seconds, sum(change.values()))
        woken_late = phase == _COMMUNICATION and change[phase] < self.slowdown_slice
        machine = not computes and (woken_late or not self._alone(phase, change, base, whole))
        if machine:
            evidence["machine"] = "the steps compute no more: the whole machine is slower"
        return self.finding(
            step,
            step=begun,
            phase=phase,
            severity=Severity.INFO if machine else self.severity,
            evidence=evidence,
        )

    def _alone(self, phase: str, change: Mapping[str, float], base: Level, whole: float) -> bool:
        """Whether a phase makes up most of a change, and grew by more than the rest of the step did."""
        rest = sum(change.values()) - change[phase]
        before = sum(base.phases.values()) - base.phases[phase]
        more = change[phase] * before * self.slowdown_alone > rest * base.phases[phase]
        return more and change[phase] >= self.slowdown_phase * whole


def level_of(blocks: Sequence[Timing]) -> Level:
    """Return the pace of a window."""
    phases = {phase: per_step(blocks, [block.usual(phase) for block in blocks]) for phase in PHASES}
    own = [max(0.0, block.usual("other") - block.usual("overhead")) for block in blocks]  # what ddpdebug takes is there
    phases |= {"other": per_step(blocks, own), _COMMUNICATION: per_step(blocks, map(_moving, blocks))}
    return Level(
        step=blocks[0].step,
        seconds=per_step(blocks, map(_pace, blocks)),
        course=tuple((block.step, _pace(block) / block.count) for block in blocks),
        phases=phases,
        cpu=per_step(blocks, [block.usual("cpu") for block in blocks]),
        elements=per_step(blocks, [block.usual("elements") for block in blocks]),
        work=_work(blocks),
    )


def _work(blocks: Sequence[Timing]) -> dict[int, _Facts]:
    often: dict[int, int] = {}
    for block in blocks:
        for optimizer in {work.optimizer for work in block.work}:
            often[optimizer] = often.get(optimizer, 0) + 1
    found: dict[int, _Facts] = {}
    for optimizer in sorted(optimizer for optimizer, number in often.items() if 2 * number > len(blocks)):
        own = [work for block in blocks for work in block.work if work.optimizer == optimizer]
        without, presence = {work.without_grad for work in own}, {work.presence for work in own} - {0}
        found[optimizer] = (
            statistics.median_low([work.micro_batches for work in own]),
            without.pop() if len(without) == 1 else None,
            presence.pop() if len(presence) == 1 else None,
        )
    return found


def _is_other_work(before: Sequence[Level], level: Level) -> bool:
    """Whether a window's steps do something else than those before, which have all done the same."""
    kinds = [tuple(one.work) for one in before]
    if _differs(kinds, tuple(level.work)):
        return True
    return any(
        _differs([one.work[optimizer][i] for one in before if optimizer in one.work], value)
        for optimizer, facts in level.work.items()
        for i, value in enumerate(facts)
    )


def _differs(before: Iterable[Hashable | None], now: Hashable | None) -> bool:
    """Whether several windows have had the same, and this one has something else; layers may be dropped at random."""
    known = [value for value in before if value is not None]
    return now is not None and len(known) > 1 and {*known} == {known[0]} and now != known[0]


def _pace(block: Timing) -> float:
    return max(0.0, block.usual("own") + _moving(block) - block.usual("overhead"))


def _moving(block: Timing) -> float:
    """Return what the rank that came last has waited: that is the transfer, the others wait for this rank as well."""
    return min(block.times["wait"])


def _typical(levels: Iterable[Level]) -> Level:
    known = list(levels)
    return Level(
        step=known[0].step,
        seconds=middle(level.seconds for level in known),
        phases={phase: middle(level.phases[phase] for level in known) for phase in known[0].phases},
        cpu=middle(level.cpu for level in known),
        elements=middle(level.elements for level in known),
    )


def _deviation(levels: Sequence[Level]) -> float:
    return spread([level.seconds for level in levels])


def _beginning(levels: Iterable[Level], base: Level) -> int:
    """Return the step from which on the pace is nearer to that of the last levels than to that before."""
    course = [block for level in levels for block in level.course]
    usual = middle(seconds for _, seconds in course)
    limit, most = (base.seconds + usual) / 2, 2 * usual - base.seconds
    best, total, found = 0.0, 0.0, course[-1][0]
    for step, seconds in reversed(course):
        total += min(seconds, most) - limit  # one late step is not everything
        if total > best:
            best, found = total, step
    return found


def _ratio(before: Level, after: Level) -> float:
    """Return how many times as long a step takes; where elements grew as well, for each of them."""
    if not before.seconds > 0:
        return 1.0
    ratio = after.seconds / before.seconds
    if before.elements > 0 and after.elements > 0:
        ratio = min(ratio, ratio * before.elements / after.elements)
    return ratio
