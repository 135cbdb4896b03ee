"""SLOW603: the step time regressed against the run's own baseline."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ddpdebug.detectors.kinds import Examples, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.detectors.slow.timing import PaceRule, Timing, duration, job, middle, per_step
from ddpdebug.schema.pace import PHASES

_MAD = 1.4826  # a normal distribution's standard deviation / median absolute deviation
_COMMUNICATION = "communication"
#: Levels that are remembered; when there are more, every second one goes.
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Level:
    """The pace of a window: medians over its blocks, for one step."""

    step: int
    seconds: float  # of the median rank, and of moving data where nobody waits
    phases: Fields
    cpu: float
    elements: float
    course: tuple[tuple[int, float], ...] = ()  # step and seconds of its blocks


@dataclass(slots=True)
class _Series:
    blocks: list[Timing] = field(default_factory=list)  # of the window that fills
    before: list[Level] = field(default_factory=list)  # what the run's pace has been
    newest: deque[Level] = field(default_factory=deque)  # not yet part of that
    sum: float = 0.0  # of CUSUM
    base: Level | None = None  # while it is slower: the pace before
    begun: int = 0
    clear: int = 0


class SlowdownOverTime(PaceRule):
    """Steps since the named one take persistently longer than the run's earlier steps, for the same number of elements.

    The pace is that of the median rank, without waiting for slower ones and without what ddpdebug takes; evaluations
    and checkpoints in a part of the steps do not move it. `phase` is what covers most of the change: one of a rank's
    own or `communication`. Where all phases are slower and take no more processor time the whole machine is slower:
    that is information.

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
    - for recompilation run with `TORCH_LOGS=recompiles` and pad to fixed shapes or mark dynamic dimensions
    - remove what accumulates (MEM402, MEM403, MEM406)
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
    slowdown_everywhere = Threshold(
        0.5, "share of the whole ratio by which each large phase has to be slower for a slower machine",
        source="chosen: a phase that is slow by itself leaves the others as they were",
    )  # fmt: skip
    slowdown_large = Threshold(0.1, "share of the step from which a phase is large", source="as `straggler_share`")

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
        lambda: job(  # a full check in each step
            480,
            more=lambda step, rank, phase: 0.02 * (phase == "forward" and step >= 260),
            fields=lambda step, rank: {"overhead_seconds": 0.001 + 0.02 * (step >= 260)},
        ),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._series: dict[int, _Series] = {}

    def can_show(self, step: Step) -> bool:
        series = self._series.get(step.optimizer)
        return series is None or series.base is None

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        return ("machine" in finding.evidence,)

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        return cause.code != "SLOW602" or finding.phase == "data"

    def detect(self, step: Step) -> Findings:
        timing = self.timing(step)
        block = None if timing is None else self.block(step.optimizer, timing)
        if block is None:
            return
        series = self._series.setdefault(step.optimizer, _Series())
        series.blocks.append(block)
        if len(series.blocks) >= self.slowdown_window:
            level = level_of(series.blocks)
            series.blocks = []
            yield from self._judge(step, series, level)

    def _judge(self, step: Step, series: _Series, level: Level) -> Findings:
        newest = series.newest
        newest.append(level)
        kept = int(self.slowdown_windows)
        if series.base is not None:
            slower = _ratio(series.base, level) >= 1 + self.slowdown_over
            series.clear = 0 if slower else series.clear + 1
            if series.clear >= self.slowdown_windows:
                series.base, series.sum = None, 0.0
            elif slower:
                yield self._word(step, series.base, [*newest][-kept:], series.begun)
        elif len(series.before) >= self.slowdown_baseline:
            base = _typical(series.before)
            deviation = max(_deviation(series.before), self.slowdown_noise * base.seconds)
            series.sum = max(0.0, series.sum + (level.seconds - base.seconds) / deviation - self.slowdown_drift)
            recent = [*newest][-kept:]
            slower = len(recent) == kept and min(_ratio(base, one) for one in recent) >= 1 + self.slowdown_share
            if slower and series.sum >= self.slowdown_sum:
                found = self._word(step, base, recent, recent[0].step)
                if found.severity is self.severity or len(newest) >= self.slowdown_windows_machine:
                    series.base, series.begun, series.clear = base, _beginning(newest, base), 0
                    yield replace(found, step=series.begun)
            kept = int(self.slowdown_windows_machine) if slower else kept
        while len(newest) > kept:
            oldest = newest.popleft()
            if series.base is None:
                series.before.append(oldest)
        if len(series.before) > _KEPT:
            del series.before[1::2]

    def _word(self, step: Step, base: Level, recent: Sequence[Level], begun: int) -> Finding:
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
        large = [phase for phase, seconds in base.phases.items() if seconds >= self.slowdown_large * base.seconds]
        everywhere = all(
            change[phase] >= self.slowdown_everywhere * (ratio - 1) * base.phases[phase] for phase in large
        )
        computes = base.cpu > 0 and after.cpu - base.cpu >= self.slowdown_everywhere * (after.seconds - base.seconds)
        machine = everywhere and len(large) > 1 and not computes
        if machine:
            evidence["machine"] = "all phases are slower and compute no more: the whole machine is slower"
        return self.finding(
            step,
            step=begun,
            phase=max(change, key=lambda phase: change[phase]),
            severity=Severity.INFO if machine else self.severity,
            evidence=evidence,
        )


def level_of(blocks: Sequence[Timing]) -> Level:
    """Return the pace of a window."""
    phases = {phase: per_step(blocks, [block.usual(phase) for block in blocks]) for phase in PHASES}
    phases[_COMMUNICATION] = per_step(blocks, map(_moving, blocks))
    return Level(
        step=blocks[0].step,
        seconds=per_step(blocks, map(_pace, blocks)),
        course=tuple((block.step, _pace(block) / block.count) for block in blocks),
        phases=phases,
        cpu=per_step(blocks, [block.usual("cpu") for block in blocks]),
        elements=per_step(blocks, [block.usual("elements") for block in blocks]),
    )


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
    usual = middle(level.seconds for level in levels)
    return _MAD * middle(abs(level.seconds - usual) for level in levels)


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
