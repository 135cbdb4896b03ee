"""What a rank makes of what all ranks have sent: rows become steps, rules judge them, findings come. Torch-free.

Each rank of few judges every step and comes to the same; of many the first one judges (`many_ranks.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddpdebug.diagnosis.engine import Diagnosis, Request
from ddpdebug.exchange.partial import set_of
from ddpdebug.exchange.step_assembler import Assembler, fault_of
from ddpdebug.exchange.ticks import Tick
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor.detail_requests import Answering
from ddpdebug.monitor.many_ranks import MESSAGES, Calls, ManyRanks
from ddpdebug.monitor.sampling import Schedule
from ddpdebug.run_directory.reader import last_state
from ddpdebug.schema.announcements import Announcement, End
from ddpdebug.schema.details import read_detail
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.row import Flag, Row, decode
from ddpdebug.schema.step import Step, are_many
from ddpdebug.sinks import Record, Saved, StepJudged


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Where what is judged goes.

    Args:
        say: sends (kind, fields) to all ranks.
        write: takes a record for the sinks.
        learn: takes the steps of a tick before they are judged.
        report: takes findings, each with whether it is new, and how many steps the fastest rank has taken.
        tell_again: as of `many_ranks.Calls`.
        trouble: takes what goes wrong, once for each part.
    """

    say: Callable[..., object]
    write: Callable[[Record], object]
    learn: Callable[..., object]
    report: Callable[[Sequence[tuple[Finding, bool]], int], object]
    tell_again: Callable[[], object]
    trouble: Callable[[str, str], None]


class Judging:
    """The steps of all ranks, and what is found in them. Background thread only.

    Args:
        config: settings that rules read, and `world`.
        guard: the background thread's own.
        answering: answers what this rank is asked.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        config: Mapping[str, Any],
        guard: Guard,
        schedule: Schedule,
        answering: Answering,
        to: Outlets,
    ) -> None:
        self.rank, self.schedule, self.progress = rank, schedule, 0
        self._guard, self._answering, self._to = guard, answering, to
        self.diagnosis = Diagnosis(world=world, config=config, on_trouble=to.trouble)
        #: Of `diagnosis`: two threads of ours may use it once the ranks cannot talk.
        self.lock = threading.RLock()
        self.many: ManyRanks | None = None  # of more ranks than talk without a tree
        if are_many(world):
            self.many = ManyRanks(rank, world, self._calls())
        facts = self.diagnosis.facts
        self._assembler, self._last_states = Assembler(world, facts), Assembler(world, facts)
        self._doubted = set[int]()  # ranks with rows left out
        self._newest = dict[int, int]()  # the newest step that was judged, by optimizer
        # who has ended, and rank -> last states of it that are still to come then
        self._ended, self._awaited = set[int](), dict[int, int]()

    def _calls(self) -> Calls:
        to = self._to
        return Calls(
            say=to.say,
            learn=to.learn,
            judge=self._feed,
            show=self._show,
            report=lambda found: to.report(found, self.progress),
            adopt=lambda found: self._guard.run("diagnosis", self.diagnosis.adopt, found),
            curious=lambda step: self._guard.run("diagnosis", self.diagnosis.curious, step) or (),
            answer=self._answering.ask,
            tell_again=to.tell_again,
            tell=self._guard.tell,
        )

    @property
    def busy(self) -> bool:
        """Tell whether steps wait for answers that are to come soon."""
        waits = self.diagnosis.busy and "diagnosis" not in self._guard.off
        return waits or (self.many is not None and self.many.busy)

    def meet(self) -> None:
        """Begin anew with all ranks."""
        self._ended, self._awaited = set(), {}
        with self.lock:
            self.diagnosis.meet()

    # --- rows and steps -----------------------------------------------------------------------------------------------

    def take(self, tick: Tick) -> None:
        """Judge the steps that are complete with what a tick has brought; `conclude` says what was found in them."""
        if self.many is None:
            self._take_rows(tick)
        else:
            self._take_parts(self.many, tick)

    def _take_rows(self, tick: Tick) -> None:
        for rank, data in tick.rows:
            self._take(rank, decode(data))
        for assembler in (self._assembler, self._last_states):
            assembler.set_members(tick.members)
        self._judge(self._steps(lambda: list(self._assembler.ready())))
        last = self._last_states.rest if self._has_all_last_states(tick.members) else self._last_states.ready
        for step in self._steps(lambda: list(last())):
            self._judge_last(step)

    def _take_parts(self, many: ManyRanks, tick: Tick) -> None:
        run = self._guard.run
        run("exchange:steps", many.take, tick)
        for key, part in tick.parts.items():
            for rank in set_of(part.ranks) if key[2] else ():
                self._awaited[rank] = self._awaited.get(rank, 0) - 1
        run("exchange:steps", many.work, last_states=self._has_all_last_states(tick.members))

    def _steps(self, read: Callable[[], list[Step]]) -> list[Step]:
        return self._guard.run("exchange:steps", read) or []

    def _has_all_last_states(self, members: Sequence[int]) -> bool:
        return all([rank in self._ended and self._awaited.get(rank) == 0 for rank in members])

    def _take(self, rank: int, row: Row) -> None:
        fault = fault_of(row, rank, self.progress)
        if fault is None and row.has(Flag.LAST_STATE):
            self._awaited[rank] = self._awaited.get(rank, 0) - 1
            self._last_states.add(rank, row)
        elif fault is None:
            self._assembler.add(rank, row)
        elif rank not in self._doubted and self.rank == 0:  # all ranks see it
            self._doubted.add(rank)
            self._guard.tell(f"a row of rank {rank}", f"{fault}; it is left out, and so are others like it")

    def _judge(self, steps: Sequence[Step]) -> None:
        """Take steps of one tick; once for each part, for a guard costs as much as what some have to do."""
        if steps:
            self._to.learn(*steps)
            self._feed(*steps)

    def _feed(self, *steps: Step) -> None:
        """Hand steps of one tick to the diagnosis and to the sinks."""
        if steps[0].any(Flag.LAST_STATE):
            self._judge_last(steps[0])
            return
        for step in self._guard.run("diagnosis", self._queue, steps) or steps:
            self._show(step)

    def _queue(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps as they are meant."""
        meant = []
        for step in steps:
            self._ask(self.diagnosis.feed(step))
            meant.append(self.diagnosis.local_steps.marked(step))
        return meant

    def _ask(self, requests: Sequence[Request]) -> None:
        (self._answering if self.many is None else self.many).ask(requests)

    def _show(self, step: Step) -> None:
        schedule = self.schedule
        newest = self._newest.get(step.optimizer, step.step - 1)
        steps, self._newest[step.optimizer] = max(0, step.step - newest), max(newest, step.step)
        judged = StepJudged(
            step=step,
            steps=steps,
            interval=1 if schedule.every_step else schedule.interval(step.optimizer, step.step),
            overhead_ratio=schedule.ratio,
            overhead_of_run=schedule.ratio_of_run,
            overhead_seconds=schedule.seconds_of_run,
        )
        self._to.write(judged)

    def _judge_last(self, step: Step) -> None:
        """Compare what the last step has left; it is no step of its own."""
        self._guard.run("diagnosis", lambda: self._ask(self.diagnosis.feed(step)))
        self._to.write(Saved(kind="last_state", payload=last_state(step)))

    # --- what ranks say -----------------------------------------------------------------------------------------------

    def hear_detail(self, ranks: Sequence[int], message: Mapping[str, Any]) -> None:
        """Take an answer."""
        place, what = (int(message["optimizer"]), int(message["step"])), str(message["detail"])
        detail, last = read_detail(what, message["value"]), bool(message.get("last"))
        for rank in ranks:
            self._guard.run("diagnosis", self.diagnosis.answer, rank, *place, what, detail, last=last)

    def hear_announcement(self, rank: int, topic: str, announcement: Announcement | None) -> None:
        """Take what a rank announces; None is what cannot be read."""
        if topic == End.topic:
            self._ended.add(rank)
            promised = announcement.last_states if isinstance(announcement, End) else 0
            self._awaited[rank] = self._awaited.get(rank, 0) + promised
        self._guard.run("diagnosis", self.diagnosis.tell, topic, rank, announcement)

    def hear_of_many(self, ranks: Sequence[int], kind: str, message: Mapping[str, Any]) -> bool:
        """Take what only ranks of very many say to each other; return whether it is that."""
        if kind not in MESSAGES or self.many is None:
            return False
        self.many.hear(ranks, kind, message)
        return True

    # --- findings -----------------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Judge what has all its answers, and report what was found."""
        if self.many is None or self.many.judges:
            self._guard.run("diagnosis", self._conclude)

    def _conclude(self) -> None:
        found = self.diagnosis.tick()
        if self.many is None:
            self._to.report(found, self.progress)
        else:
            self.many.found(found)
        self._ask(self.diagnosis.requests())

    def report_news(self) -> None:
        """Report what comes of an announcement that only this rank has heard; nothing else is judged by it alone."""
        self._guard.run("diagnosis", lambda: self._to.report(self.diagnosis.news(), self.progress))

    def rest(self, *, lost: bool) -> None:
        """Judge what is left, where nothing more comes.

        A rank whose rows could not come any more has not failed to take the steps that they are about.

        Args:
            lost: the ranks cannot talk any more.
        """
        run = self._guard.run
        if self.many is not None:
            run("exchange:steps", partial(self.many.rest, complete=lost))
        self._judge(self._steps(lambda: list(self._assembler.rest(complete=lost))))
        for step in self._steps(lambda: list(self._last_states.rest(complete=lost))):
            self._judge_last(step)
        if self.many is None or self.many.judges or lost:
            run("diagnosis", lambda: self._to.report(self.diagnosis.finish(), 0))
