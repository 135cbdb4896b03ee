"""Judging on a rank: rows of all ranks become steps, the rules judge them, findings are reported. Torch-free.

The first rank that takes part has the rules judge, in a process beside it (`companion.py`), and says to all what was
found and what they are asked: they hear it in the same tick, this rank too. The next one goes on where it leaves.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdebug.diagnosis.local_steps import LocalSteps, unmarked
from ddpdebug.exchange.partial import set_of
from ddpdebug.exchange.step_assembler import Assembler, fault_of
from ddpdebug.exchange.ticks import Tick
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor.companion import Companion, Reply
from ddpdebug.monitor.detail_requests import Answering
from ddpdebug.monitor.first_steps import FirstSteps
from ddpdebug.monitor.sampling import Schedule
from ddpdebug.processes.beside import Channel
from ddpdebug.run_directory.reader import last_state
from ddpdebug.schema.announcements import Announcement, End, Failure
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.requests import Request
from ddpdebug.schema.row import Flag, Row, decode
from ddpdebug.schema.step import Step, are_many
from ddpdebug.schema.wire import to_json
from ddpdebug.sinks import Record, Saved, StepJudged

if TYPE_CHECKING:
    from ddpdebug.monitor.many_ranks import ManyRanks

#: What ranks of very many say to each other besides: rows of steps of which all are wanted.
MESSAGES = frozenset({"rows", "row"})
#: So often questions may follow from answers at the end.
_LAST_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """The functions that receive the results of judging.

    Args:
        say: sends (kind, fields) to all ranks.
        write: takes a record for the sinks.
        learn: takes the steps of a tick before they are judged.
        report: takes findings, each with whether it is new, and how many steps the fastest rank has taken.
        known: returns what was found so far.
        log: returns where all that was heard can be read again, None where it is not written down.
        announce_again: called as another rank begins to judge, which has not heard what ranks announced before.
        speak: called as this rank is that other one.
        trouble: takes what goes wrong, once for each part.
        start: as of `Companion`.
    """

    say: Callable[..., object]
    write: Callable[[Record], object]
    learn: Callable[..., object]
    report: Callable[[Sequence[tuple[Finding, bool]], int], object]
    known: Callable[[], Sequence[Finding]]
    log: Callable[[], Path | None]
    announce_again: Callable[[], object]
    speak: Callable[[], object]
    trouble: Callable[[str, str], None]
    start: Callable[[], Channel] | None = None


def load_for(said: str) -> None:
    """Load as ddpdebug attaches what very many ranks need, unless the job has said that its ranks are fewer.

    Args:
        said: how many they are, empty if nobody has said it.
    """
    if not said.isdecimal() or are_many(int(said)):
        importlib.import_module("ddpdebug.monitor.many_ranks")


class Judging:
    """The steps of all ranks, and their judging. Background thread only.

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
        #: Of what follows: two threads of ours may use it once the ranks cannot talk.
        self.lock = threading.RLock()
        self.judges = rank == 0
        self._members: tuple[int, ...] = ()
        self.succeeds = False  # it judges in the place of another rank
        self._takes_over = False  # it judges from its next step on, alone
        self._hears_itself = False  # what it announces the ranks that judge cannot hear
        self._companion = Companion({"world": world, "config": config}, to.log, to.known, to.trouble, to.start)
        self._local_steps = LocalSteps(config)
        self._unheard: list[Sequence[tuple[Finding, bool]]] = []  # what was found and said, until this rank hears it
        self._has_steps = False  # of this tick, about which the ranks may be asked in the next
        self.many: ManyRanks | None = None  # of more ranks than talk without a tree
        if are_many(world):
            from ddpdebug.monitor.many_ranks import Calls, ManyRanks  # noqa: PLC0415 - as of `load_for`

            calls = Calls(
                say=to.say, learn=to.learn, judge=self._feed, show=self._show, curious=self._curious, tell=guard.tell
            )
            self.many = ManyRanks(rank, world, calls)
        self._assembler, self._last_states = Assembler(world), Assembler(world)
        self._first_steps = FirstSteps()
        self._doubted = set[int]()  # ranks with rows left out
        self._newest = dict[int, int]()  # the newest step that was judged, by optimizer
        # who has ended, and rank -> last states of it that are still to come then
        self._ended, self._awaited = set[int](), dict[int, int]()

    @property
    def busy(self) -> bool:
        """Whether answers or questions are expected soon."""
        if "diagnosis" in self._guard.off:
            return False
        own = self._companion.busy if self.judges else self._has_steps
        return own or (self.many is not None and self.many.busy)

    @property
    def _hears(self) -> bool:
        """Whether its rules hear what ranks announce."""
        return self._hears_itself or (self.judges and not self._takes_over)

    def meet(self) -> None:
        """Start anew after a meeting of all ranks."""
        self._ended, self._awaited = set(), {}
        with self.lock:
            if self._hears:
                self._companion.meet()

    def close(self) -> None:
        """Close the companion."""
        with self.lock:
            self._companion.close()

    # --- rows and steps -----------------------------------------------------------------------------------------------

    def take(self, tick: Tick) -> None:
        """Judge the steps that a tick has completed; `conclude` announces the results."""
        self._follow(tick.members)
        self._has_steps = False
        if self.many is None:
            self._take_rows(tick)
        else:
            self._take_parts(self.many, tick)

    def _follow(self, members: tuple[int, ...]) -> None:
        """Judge in the place of a rank that has left, as the next one."""
        if members is self._members:
            return
        before, self._members = self._members[:1], members
        judged, self.judges = self.judges, members[:1] == (self.rank,)
        if self.many is not None:
            self.many.judges = self.judges
        self._takes_over = self.judges and (self._takes_over or not judged)
        if before and before[0] not in members and len(members) > 1:
            self._take_over()
            self._to.announce_again()

    def _take_over(self) -> None:
        if self._takes_over:
            self._takes_over = False
            self.succeeds = True
            self._companion.go_on()
            self._to.speak()

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
        """Hand steps of one tick to the rules and to the sinks."""
        if steps[0].any(Flag.LAST_STATE):
            self._judge_last(steps[0])
            return
        self._has_steps = True
        for step in self._guard.run("diagnosis", self._queue, steps) or steps:
            self._show(step)

    def _queue(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps as they are meant."""
        meant = []
        if self._takes_over:
            self._take_over()
            self._to.announce_again()
        for step in steps:
            if self.judges:
                self._companion.feed(step)
            questions = self._first_steps.questions(step)
            if self.many is None:  # all ranks see the same steps
                self._answering.ask([one for one in questions if self.rank in one.ranks])
            else:
                self._pass_on(Reply(asks=questions))
            self._local_steps.read(unmarked(step))
            meant.append(self._local_steps.marked(unmarked(step)))
        return meant

    def _curious(self, step: Step) -> Sequence[str]:
        return self._guard.run("diagnosis", self._companion.curious, step) or ()

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
        if self.judges:
            self._guard.run("diagnosis", self._companion.feed, step)
        self._to.write(Saved(kind="last_state", payload=last_state(step)))

    # --- what ranks say -----------------------------------------------------------------------------------------------

    def hear_detail(self, ranks: Sequence[int], message: Mapping[str, Any]) -> None:
        """Pass a rank's detail to the rules."""
        place = int(message["optimizer"]), int(message["step"]), str(message["detail"])
        for rank in ranks if self.judges else ():
            self._companion.answer(rank, *place, message["value"], bool(message.get("last")))

    def hear_announcement(self, rank: int, topic: str, announcement: Announcement | None) -> None:
        """Pass a rank's announcement to the rules; None stands for a malformed one."""
        if topic == End.topic:
            self._ended.add(rank)
            promised = announcement.last_states if isinstance(announcement, End) else 0
            self._awaited[rank] = self._awaited.get(rank, 0) + promised
        if self._takes_over and isinstance(announcement, Failure) and self._to.log() is not None:
            self._take_over()  # what the one before it has heard may be why, and no step may come any more
        if self._hears:
            self._guard.run("diagnosis", self._companion.tell, topic, rank, announcement)

    def hear_judge(self, ranks: Sequence[int], kind: str, message: Mapping[str, Any]) -> bool:
        """Handle a message of the judging rank, or one to it from many ranks; return whether it was one."""
        if kind == "findings":
            if self.rank in ranks and self._unheard:
                self._to.report(self._unheard.pop(0), self.progress)
            else:
                found = [(Finding.from_json(str(text)), bool(new)) for text, new in message["found"]]
                self._to.report(found, self.progress)
        elif kind == "ask":
            if self.rank in message["ranks"]:
                optimizer, step, last = int(message["optimizer"]), int(message["step"]), bool(message["last"])
                asked = Request(optimizer=optimizer, step=step, kind=str(message["kind_of"]), last=last)
                self._answering.ask([asked])
        elif kind in MESSAGES and self.many is not None:
            self.many.hear(ranks, kind, message)
        else:
            return False
        return True

    # --- findings -----------------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Announce the results of the rules so far: findings, and detail requests to the ranks."""
        if self._hears and self.judges:
            self._guard.run("diagnosis", lambda: self._pass_on(self._companion.tick()))

    def _pass_on(self, reply: Reply) -> None:
        alone = self._members == (self.rank,)  # nobody else is to do the same in the same tick
        if alone:
            self._to.report(reply.found, self.progress)
            self._answering.ask(reply.asks)
            return
        if reply.found:
            self._unheard.append(reply.found)
            self._to.say("findings", found=[(finding.to_json(), new) for finding, new in reply.found])
        for asked in reply.asks:
            about = {"optimizer": asked.optimizer, "step": asked.step, "last": asked.last}
            self._to.say("ask", **about, kind_of=asked.kind, ranks=sorted(asked.ranks))

    def report_news(self) -> None:
        """Report findings from an announcement that only this rank has heard; nothing else is judged by it alone."""
        self._guard.run("diagnosis", lambda: self._to.report(self._companion.news().found, self.progress))

    def hear_itself(self) -> None:
        """Judge this rank's announcements in this process, because the judging rank cannot hear them."""
        if not self.judges:
            self._hears_itself = self._companion.here = True

    def rest(self, *, lost: bool) -> None:
        """Judge the remaining steps, as no more rows come.

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
        for found in self._unheard:
            run("diagnosis", self._to.report, found, 0)
        if self.judges and not self._takes_over:
            run("diagnosis", self._finish)
        elif self._hears_itself:
            self.report_news()

    def _finish(self) -> None:
        """Judge to the end; what is asked only now, because the companion was slow, this rank alone can answer."""
        for _ in range(_LAST_ROUNDS):
            reply = self._companion.wait()
            self._to.report(reply.found, 0)
            if not reply.asks:
                break
            for asked in reply.asks:
                about = asked.optimizer, asked.step, asked.kind
                self._companion.answer(self.rank, *about, to_json(self._answering.now(asked)), asked.last)
        self._to.report(self._companion.finish().found, 0)
