"""SLOW602: the step waits for input data."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.kinds import Examples, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.detectors.slow.slow601_straggler import Straggler
from ddpdebug.detectors.slow.timing import PaceRule, Timing, Window, duration, job, per_step
from ddpdebug.schema.announcements import AwaitedLoader, Loader


class InputBound(PaceRule):
    """A large share of the step passes between the request for a batch and its arrival, on the median rank.

    `share` is that share, `loader` says how the loader is set up, `helps` what of it to change first.

    Impact: the accelerators idle for that share; with several ranks the slowest loader sets the pace of all.

    Diagnosis: time the loop over the loader without any model: if it is as slow, the pipeline is the limit. Repeat with
    one cached batch to get the model's own pace (`model_seconds` estimates it). Look at the CPU use of the workers
    (busy: decoding or augmentation; idle: storage) and for a spike at each epoch start (workers are started again).

    Causes:
    - too few workers, or `num_workers=0`
    - expensive decoding or augmentation for each sample in Python
    - storage latency: many small files, network file systems, no read-ahead
    - workers that fight for cores: threads inside workers, too many ranks on one host
    - no overlap: unpinned memory and blocking copies, a synchronisation before the next batch is asked for

    Remedy:
    - raise `num_workers` and `prefetch_factor`, set `persistent_workers=True`
    - set `pin_memory=True` and copy with `.to(device, non_blocking=True)`
    - call `torch.set_num_threads(1)` in the workers
    - decode once and store the result, read large sequential shards, move augmentation to the device
    - copy the data to local disks
    """

    code = "SLOW602"
    severity = Severity.WARNING
    title = "the step waits for input data"
    incident = ()
    pace_warm_up, pace_block = PaceRule.pace_warm_up, PaceRule.pace_block
    pace_window = Straggler.pace_window
    input_share = Threshold(
        0.2, "share of the step that the median rank waits for data", source="chosen: less is seldom worth the work"
    )
    input_seconds = Threshold(
        0.005,
        "seconds of a step that the median rank waits for data",
        source="chosen: a loader without workers takes 1 ms for a small batch",
    )
    input_windows = Threshold(
        4, "windows in a row that show it, a quarter of each new", source="chosen: the first steps may fill a cache"
    )
    input_falls = Threshold(
        0.33, "share by which waiting falls over so many windows while a cache fills",
        source="chosen: more than the scheduler does to a median",
    )  # fmt: skip

    fires_on = Examples(
        lambda: job(120, more=lambda step, rank, phase: 0.03 * (phase == "data")),
        lambda: job(120, world=1, more=lambda step, rank, phase: 0.03 * (phase == "data")),
    )
    silent_on = Examples(
        lambda: job(120),
        lambda: job(120, more=lambda step, rank, phase: 0.06 * (phase == "data" and step % 4 == 0)),
        lambda: job(200, more=lambda step, rank, phase: 0.04 * (phase == "data" and step < 40)),
        lambda: job(
            300, more=lambda step, rank, phase: 0.1 * (phase == "data") * math.exp(-step / 60)
        ),  # a cache fills
        lambda: tuple(step_at(i, step_seconds=0.008, data_seconds=0.004, forward_seconds=0.004) for i in range(600)),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._window = Window(int(self.pace_window))
        self._first: Timing | None = None  # block of windows in a row that show it
        self._waits: deque[float] = deque(maxlen=int(self.input_windows))  # of the newest of them

    def can_show(self, step: Step) -> bool:
        return self._first is None

    def detect(self, step: Step) -> Findings:
        timing = self.iteration(step)
        block = None if timing is None else self.block(timing)
        if block is None or (blocks := self._window.add(block)) is None:
            return
        data = per_step(blocks, [block.usual("data") for block in blocks])
        share = data / per_step(blocks, [block.seconds for block in blocks])
        if share < self.input_share or data < self.input_seconds:
            self._first = None
            self._waits.clear()
            return
        self._first = self._first or blocks[0]
        self._waits.append(data)
        if len(self._waits) == self.input_windows and data > (1 - self.input_falls) * self._waits[0]:
            yield self._word(step, self._first, blocks, data)

    def _word(self, step: Step, first: Timing, blocks: Sequence[Timing], data: float) -> Finding:
        seconds = per_step(blocks, [block.seconds for block in blocks])
        loader = _loader(step)
        evidence: dict[str, Any] = {
            "waiting": f"{100 * data / seconds:.0f} % of each step, {duration(data)} of {duration(seconds)}",
            "share": round(data / seconds, 4),
            "data_seconds": round(data, 6),
            "step_seconds": round(seconds, 6),
            "model_seconds": round(math.fsum((seconds, -data)), 6),
        }
        copies = [value for value in step.columns["copy_seconds"] if value >= 0]
        if copies:
            evidence["copy_seconds"] = round(statistics.median(copies), 6)
        if loader is not None:
            told: dict[str, Any] = {
                "workers": loader.workers,
                "prefetch": loader.prefetch,
                "persistent": loader.persistent,
            }
            told |= {"pinned": loader.pinned, "batch_size": loader.batch_size, "dataset": loader.dataset}
            evidence["loader"] = {key: value for key, value in told.items() if value is not None}
            evidence["helps"] = _help(step, loader)
            if loader.iterations == 1:
                evidence["first_epoch"] = "over this data: where it fills a cache, the next ones are faster"
        location = None if loader is None else loader.location
        return self.finding(step, step=first.step, phase="data", location=location, evidence=evidence)


def _loader(step: Step) -> Loader | None:
    """Return the loader that is waited for most; where nobody has told, the one that was used first."""
    told: list[AwaitedLoader] = [*step.facts.get(AwaitedLoader.topic, {}).values()]
    used = sorted(
        (int(topic.removeprefix("loader:")), min(values.items())[1])
        for topic, values in step.facts.items()
        if topic.startswith("loader:")
    )
    number = told[0].loader if told else min((number for number, _ in used), default=0)
    return dict(used).get(number)


def _help(step: Step, loader: Loader) -> list[str]:
    """Return what to change first, from how the loader is set up."""
    found = []
    if not loader.workers:
        found.append("num_workers is 0: the process that trains loads by itself, and trains meanwhile nothing")
    else:
        found.append(f"the {loader.workers} workers do not keep up: more of them, or less work for each sample")
        if loader.persistent is False and loader.iterations > 1:
            found.append("persistent_workers=True: they are started again in each epoch")
    if loader.pinned is False and any(row.device_limit_bytes for row in step.rows.values()):
        found.append("pin_memory=True, and copies with non_blocking=True")
    return found
