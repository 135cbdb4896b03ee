"""The wiring: probes -> rows -> exchange -> steps -> rules -> findings -> sinks, from install to close."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from ddpdebug import devices, torch_internals as internals
from ddpdebug._version import __version__
from ddpdebug.clock import time, utc_now
from ddpdebug.config.settings import Config, run_directory
from ddpdebug.detectors.fail.texts import is_victims
from ddpdebug.diagnosis.reporter import Reporter, key_of, unravel, utc
from ddpdebug.disk import Disk, mode_of
from ddpdebug.errors import FindingError, StopRun, text_of
from ddpdebug.exchange.beats import Beats
from ddpdebug.exchange.meeting import ADDRESS, RollCall
from ddpdebug.exchange.step_vote import NumericGuard
from ddpdebug.exchange.ticks import Exchange, Group, Tick, wire_format
from ddpdebug.forensics.element_search import Elements
from ddpdebug.forensics.failure import about_error
from ddpdebug.forensics.memory.memory import MemoryForensics
from ddpdebug.forensics.memory.oom import checkpoint_bytes
from ddpdebug.forensics.output_probe import AgreementProbe
from ddpdebug.forensics.replay.investigator import Investigator
from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard, contained
from ddpdebug.isolation.user_code import is_users
from ddpdebug.monitor.covering import Covering
from ddpdebug.monitor.detail_requests import Answering
from ddpdebug.monitor.hang_stop import EXIT_STATUS, HangStop, end_children, leave_in_time, line_of
from ddpdebug.monitor.judging import MESSAGES, Judging, Outlets
from ddpdebug.monitor.progress import ProgressWatch
from ddpdebug.monitor.sampling import Schedule
from ddpdebug.monitor.served import Host, Pusher, Served
from ddpdebug.monitor.side_groups import Meeting, SideGroups
from ddpdebug.monitor.sinks import open_sinks, own_device, serves, stand_in, start_pusher, start_served
from ddpdebug.monitor.spawned import Origin, Starts, note
from ddpdebug.printing import be_brief, put
from ddpdebug.probes.coverage import CoverageProbe
from ddpdebug.probes.handover import Plans, StepStore
from ddpdebug.probes.memory import private_bytes
from ddpdebug.probes.record import StepRecord, encode_row
from ddpdebug.probes.step_digests import GradientDigests
from ddpdebug.probes.training_events import GroupEnds, NeverStepped, OptimizerEnded, StepClosed, StepPassed
from ddpdebug.processes import stacks
from ddpdebug.progress.watcher import Watcher
from ddpdebug.redaction import Redactor
from ddpdebug.run_directory.reader import RANKS, SPAWNED, STACKS, bytes_of_log, read_findings, read_outcomes, read_run
from ddpdebug.run_directory.writer import OwnFindings
from ddpdebug.schema.announcements import (
    Announcement,
    End,
    Failure,
    Hang,
    HangOver,
    MemoryState,
    Place,
    RankCoverage,
    Scope,
    read_announcement,
    scope_of,
    topic_text,
)
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.hangs import ENDED, is_by_hang, is_hang, name_of, reason_of
from ddpdebug.schema.row import Flag, Row, encode
from ddpdebug.schema.step import Step
from ddpdebug.schema.wire import to_json
from ddpdebug.sinks import FindingRaised, Met, Record, RunEnded, Saved, Trouble
from ddpdebug.sinks.fanout import Fanout

if TYPE_CHECKING:
    from ddpdebug.exchange.tree import Tree

#: When the model and the optimizers' state, as a checkpoint holds them, are measured: a scaler may skip first steps.
_WEIGHED = frozenset({0, 1, 10, 100, 1000})
_LAST_STATES = 16
#: What all ranks do at the same step is agreed on so long ahead of the fastest rank: a stop, and a look.
_STOP_SECONDS, _LOOK_SECONDS = 0.5, 0.1
#: Sinks hear so often who takes part.
_MET_SECONDS = 5.0
#: Settings by which every rank decides for itself what all must do alike.
_SHARED_SETTINGS = ("tolerance", "threshold", "ignore", "on_finding", "on_hang", "guard", "max_skips")
_OF_HANGS = ("progress", "waits", "waiting")
#: What only the rank that judges needs, where ranks are very many.
_REPORTS = frozenset({"detail", "row", "trouble", "progress"})
#: Announcements that all ranks act upon.
_FOR_ALL = frozenset({End.topic, Failure.topic, MemoryState.topic, Hang.topic, HangOver.topic})
#: What the ranks say to each other; anything else is of no version that we know.
_MESSAGES = frozenset(
    (
        "detail",
        "fact",
        "vote",
        "unguarded",
        "agree",
        "element",
        "stop",
        "trouble",
        "leave",
        "findings",
        "ask",
        *_OF_HANGS,
        *MESSAGES,
    )
)
#: How long the end waits for what a replay finds.
_REPLAY_SECONDS = 5.0
#: A rank that judges in the place of another one reads so many bytes of its records, some seconds of its companion.
_MOST_LOG = 8 << 20
#: The ranks' n-th monitors belong together and must not find the keys of earlier ones in the store.
_NUMBERS = itertools.count()


class Monitor:
    """Watches one process of a job. Made by `install` (commands) or `watch` (Python); `close` ends it.

    Args:
        config: the settings, already validated.
        command: what runs, for the records.
        starts: makes what ranks must know that the script starts by itself; None leaves these alone.
        origin: by what such a rank was started.
        progress_watch: makes the watch over hangs.
    """

    _served: Served | None = None  # has told the companion to serve
    _pusher: Pusher | None = None  # sends a hub what the run directory has
    _failure: Failure | None = None  # of this rank, as long as nobody has heard it
    _progress_watch: ProgressWatch | None = None  # of several ranks
    _begun, _lost = False, ""  # whether the exchange was started, and why it cannot be
    #: Called in the place of `os._exit`, where a hang ends this rank, with the hang; set before the script runs.
    ends_hang: Callable[[Finding], object] | None = None
    _hang_stop: HangStop | None = None
    _leaving = False
    _offered = -1  # every so many steps a batch is compared: how often that was due
    _beats: Beats | None = None
    _said = _ours = frozenset[str | None]()  # ids of findings: those of rank 0, and those of this rank in its place
    _stands_in = False  # it has the sinks to speak in the place of rank 0

    def __init__(
        self,
        config: Config,
        command: Sequence[str] = (),
        *,
        starts: Callable[..., Origin] | None = None,
        origin: Origin | None = None,
        progress_watch: Callable[..., ProgressWatch] = ProgressWatch,
    ) -> None:
        self.config, self.redactor, self._make_progress_watch = config, Redactor(command), progress_watch
        self.command = tuple(self.redactor.words)  # as it is written and shown
        self.disk = Disk(mode_of(config.file_mode))
        self.rank, self.world = 0, 1
        self._number = next(_NUMBERS) if origin is None else origin.number
        self.run_id = os.environ.get("DDPDEBUG_RUN_ID") or secrets.token_hex(3) if origin is None else origin.run_id
        self._origin = origin
        self.starts = None if starts is None else Starts(partial(self._become_origin, starts), lambda: self.world > 1)
        self.reporter = Reporter(self._write, utc)
        self.schedule = Schedule(budget=config.budget, every_step=config.every_step)
        self.guard = Guard(self._trouble)
        self.numeric_guard = NumericGuard(config.guard, config.max_skips, self._say, self._trouble)
        self.probes = Probes(
            self.guard,
            self._emit,
            self._announce,
            self.schedule.due,
            watched=self.schedule.watched,
            passed=self._passed,
            hand_over_last=self._emit_last,
            on_group=self._on_group,
            stop=self._stop_now,
            vote=None if config.guard == "off" else self.numeric_guard,
            keep_inputs=config.keep_inputs << 20,
            replay=config.replay == "child",
            want_norms=config.tolerance is not None,
            validation_loss=config.validation_loss,
            looks_at_all=lambda: self.schedule.every_step,
        )
        self.fanout: Fanout | None = None
        self.directory: Path | None = None
        self._home: Path | None = None  # the same wherever the script moves to
        self._exchange: Exchange | None = None
        # announcements made before the ranks could talk; topic -> what the rank that judges was told (any thread)
        self._early, self._announced = list[dict[str, Any]](), dict[str, dict[str, Any]]()
        self._troubles: list[Trouble] = []
        self._writing = threading.Lock()  # of `_troubles` and `_has_sinks`, for any thread may be in trouble
        self._has_sinks = False
        # the only objects that both threads touch; see docs/how-it-works.md
        self._records, self._plans = StepStore(), Plans()
        self._back = Guard(self._trouble)  # of the background thread: a guard counts the time of one thread
        self._steps = dict[int, int]()  # taken, by optimizer
        self._thread_seconds, self._closed = 0.0, False
        self._stopping = self._unguarded = False  # these and what follows: of the background thread
        self._pid, self._began, self._host, self._door = os.getpid(), utc(), Host(), secrets.token_hex(8)
        bus, state = self.probes.bus, self.probes.state
        Investigator(
            bus,
            state,
            self.probes.captures,
            self.guard,
            lambda: (self.rank, self._home),
            self.probes.children,
            lambda record: self._answering.again(record, "numerics"),
            limit=config.bundle_limit << 20,
            facts={"command": list(self.command), "run": self.run_id},
            redactor=self.redactor,
            disk=self.disk,
        )
        self.elements = Elements(0, self._say, self._plans)
        self.agreement = AgreementProbe(self._say, self._announce, self._plans)
        bus.on("forensics:elements", StepPassed, self._look_as_planned)
        bus.on("probe:disk", StepClosed, self._weigh)
        bus.on("forensics:elements", StepClosed, lambda event: self.elements.capture(event.watch, event.record.step))
        bus.on("forensics:elements", OptimizerEnded, lambda event: self.elements.last_look(event.watch))
        bus.on("forensics:agreement", StepClosed, self._agree)
        bus.on("exchange:part", GroupEnds, self._part)
        self.memory = MemoryForensics(
            bus,
            state,
            self.guard,
            self.probes.memory,
            self.reporter.add_to,
            self._announce,
            lambda: self._home,
            plans=self._plans,
            redactor=self.redactor,
            disk=self.disk,
        )
        self._members, self._unoffered = 1, False
        self._met = Met(members=()), 0.0  # last met, and when
        self.covering = Covering(self._account, self._write, self._announce, quiet=config.quiet)
        starting = None if self.starts is None else (self.starts.before, self.starts.after)
        self._counts = CoverageProbe(bus, self.probes.entries, state.wrappers, self._on_child, starting)
        bus.on("probe:coverage", NeverStepped, lambda _: self.covering.start())
        self._last = StepStore(_LAST_STATES)
        self._promised = 0  # last states that this rank has handed over
        self._answering = Answering(state, self.memory.holder_search, self._records, self._last, self._say, self._back)
        self._judging = self._new_judging()
        meeting = Meeting(
            identity=self._identity,
            begins=self.covering.meeting,
            missing=self._why_not_wait,
            met=self._on_met,
            connecting=self._connecting,
            on_silence=self._on_silence,
        )
        self.groups = SideGroups(self._number, meeting)

    # --- public -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def observe(self, **values: Any) -> None:
        """Report what hooks cannot see: `loss` of the step and `val_loss`, each a scalar tensor or a number, unscaled.

        Raises:
            ValueError: another name is given.
        """
        unknown = sorted(values.keys() - {"loss", "val_loss"})
        if unknown:
            raise ValueError(f"observe() got {unknown[0]!r}; valid are 'loss' and 'val_loss'")
        for name, value in values.items():
            if value is not None:
                self.guard.run("probe:observe", self.probes.calls.observed, name, value)

    @property
    def findings(self) -> list[Finding]:
        """The findings so far, oldest first."""
        return self.reporter.findings

    @property
    def coverage(self) -> Coverage:
        """The coverage so far: checks that were made and checks that were not."""
        return self.covering.coverage()

    def _repr_html_(self) -> str:
        """Return what a notebook shows: what is watched, what was not looked at, and the findings, all escaped."""
        import html  # noqa: PLC0415 - for notebooks

        state = "ended" if self._closed else "watching"
        findings = self.findings
        about = f"ddpdebug: {state} rank {self.rank} of {self.world} · run {self.run_id} · {len(findings)} findings"
        shown = "".join(finding._repr_html_() for finding in findings)
        return f"<div><p>{html.escape(about)}<br>{html.escape(self.coverage.line())}</p>{shown}</div>"

    def watch_replica(self, name: str, module: torch.nn.Module) -> None:
        """Compare a module outside DDP (EMA, teacher) between ranks, as RANK113, under the given name."""
        self.probes.replicas.add(name, module)

    def expect_growth(self, what: str, size: int | None = None) -> None:
        """Declare intended memory growth (a replay buffer), of at most `size` bytes; None sets no limit."""
        self.memory.expect(what, size)

    def agree(self, *batch: Any) -> None:
        """Feed rank 0's `batch` (the arguments of forward) to every rank soon; if the outputs differ, it is RANK107.

        Raises:
            ValueError: the batch is too large or holds something other than tensors and plain values.
        """
        if self.rank == 0:
            self.agreement.offer(batch)

    def close(self, reason: str = "finished", exit_code: int | None = 0, error: BaseException | None = None) -> None:
        """Send all queued data, write the outcome and remove all hooks. Idempotent; takes 5 s at most.

        Where a question is open, or the companion answers slowly, it takes up to 10 s more.

        A replay that is still at work is waited for up to 6 s more.

        Args:
            error: why it ends, by default the exception that is being handled.
        """
        if self._closed or os.getpid() != self._pid:
            return
        while self._leaving:  # the other thread ends this process, and another rank's end has thrown the script out
            time.sleep(1.0)
        error, thrown = error or sys.exc_info()[1], None
        devices.failure.note(error)
        for act in self._last_acts(reason, exit_code, error):
            try:
                act()
            except BaseException as caught:  # noqa: BLE001 - a signal handler's of the script: the others hear the end first
                thrown = thrown or caught
        if thrown is not None:
            raise thrown

    def _last_acts(
        self, reason: str, exit_code: int | None, error: BaseException | None
    ) -> tuple[Callable[[], object], ...]:
        run, contain, probes = self.guard.run, self.guard.contain, self.probes
        yields = cache(lambda: bool(run("close:spawned", self._is_run_of_others)))
        return (
            lambda: run("close:hang", self._follow, reason),
            lambda: run("close:by-hand", probes.recorder.end_by_hand),
            lambda: run("close:memory", self.memory.close, error),
            lambda: run("close:last-state", probes.last_state.look_back),
            lambda: run("close:numerics", probes.end_numbers.look),
            probes.last_state.close,
            lambda: probes.children is None or run("close:replay", probes.children.finish, _REPLAY_SECONDS),
            self._seal,
            lambda: run("close:optimizers", probes.recorder.end),
            lambda: run("forensics:agreement", self.agreement.run, probes.state.wrappers, -1, last=True),
            lambda: run("close:patches", probes.remove, finished=self._is_whole(reason)),
            lambda: run("close:hooks", probes.release),
            lambda: yields() or run("close:exchange", self._leave, reason, error),
            lambda: run("close:coverage", self.covering.close, look=not yields()),
            self._let_store_go,
            lambda: contain("close:companion", self._judging.close),
            lambda: contain("close:end", self._end, reason, exit_code),
            lambda: self.fanout is None or contain("close:sinks", self.fanout.close),
            lambda: contain("close:companion", self._host.close),
            lambda: self._pusher is None or contain("close:pusher", self._pusher.close),
            lambda: devices.failure.forget(self._device_failed),
        )

    def _seal(self) -> None:
        self._closed = True

    def _let_store_go(self) -> None:
        self.groups.let_store_go()
        self.covering.let_store_go()
        if self._beats is not None:
            self._beats.let_go()

    def _is_whole(self, reason: str) -> bool:
        """Whether what has ended is a script, or an epoch."""
        return reason == "finished" and bool(
            self.command or self.guard.run("close:loaders", lambda: self.probes.loaders.repeated)
        )

    def _end(self, reason: str, exit_code: int | None) -> None:
        self._write(RunEnded(reason=reason, exit_code=exit_code, steps=dict(self._steps), time=utc()))

    def _is_run_of_others(self) -> bool:
        """Whether the ranks of the run are those that the script has started, and this process was none."""
        if self.starts is None:
            return False
        yields = self._exchange is None and not self._steps and self.starts.has_run
        self.starts.close()
        return yields

    def _become_origin(self, make: Callable[..., Origin], notes: Path) -> Origin:
        """Return what ranks that the script starts must know; a run directory of this process's own stays its own."""
        if self._home is not None:
            out = self._home / SPAWNED
        else:
            out = (self.config.out or run_directory(self.run_id, utc_now())).absolute()
        return make(
            config=replace(self.config, out=out),
            command=self.command,
            run_id=self.run_id,
            number=self._number,
            notes=notes,
        )

    def _leave(self, reason: str, error: BaseException | None) -> None:
        if self._exchange is not None or self._steps or self.command:
            self._begin(alone=True)
        if reason.startswith("exception"):
            state, alone = self.probes.state, self.probes.entries.threads.alone
            known = self.guard.run("close:failure", about_error, error, reason, state, alone) or {}
            if (newest := self._records.newest()) is not None:
                gradients = newest.parts.get(GradientDigests)
                known |= {"step": newest.step, "missing": () if gradients is None else tuple(gradients.missing)}
            self._failure = Failure(reason=reason, **known)
            self._announce(self._failure)
            if self._progress_watch is not None:
                self.guard.run("close:lost-rank", self._progress_watch.thrown_out, reason)
        elif self._progress_watch is not None:
            self.guard.run("close:progress", self._progress_watch.finish)
        self._tell_end(reason)
        over = self._exchange is None or self._exchange.close()
        if over and self._progress_watch is not None:
            self.guard.run("close:progress", self._progress_watch.close, reason)
        if over:
            self._judge_rest()

    def _tell_end(self, reason: str) -> None:
        """Say the last things before this rank leaves the others."""
        self.covering.tell()
        steps = {str(optimizer): count for optimizer, count in self._steps.items()}
        entered = self._progress_watch and self.guard.run("close:progress", self._progress_watch.entered)
        self._announce(End(steps=steps, reason=reason, last_states=self._promised, entered=entered or {}))
        self._promised = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close("finished" if error is None else f"exception: {text_of(error)}")

    # --- start --------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the hooks."""
        devices.failure.when(self._device_failed)
        self._pusher = self.guard.run("pusher", start_pusher, self.config, os.environ, self._trouble)
        self._served = self.guard.run("companion", self._start_beside)
        if lacking := internals.missing():
            self._trouble("torch", f"this torch lacks {', '.join(lacking)}; some checks are off")
        self.guard.run("patches", self.probes.patches.install)
        self.guard.run("probe:coverage", self._counts.install)
        self.guard.run("memory", self.memory.install, self.config)
        entries = self.probes.entries
        entries.at_exit("close", self._close_at_exit)
        entries.in_child("close:child", self.forked)
        self._on_group()

    def _start_beside(self) -> Served | None:
        """Start the companion before the script goes on, which can look at processes, and let it take its port."""
        rank = int(os.environ.get("RANK", "0"))
        local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
        leads = rank == 0 or (local_rank == 0 and serves(self.config, rank))
        if not sys.platform.startswith("linux") or not leads:
            return None
        with suppress(Exception):  # where there can be none, who needs it says so, later
            self._host.records()
            if "RANK" in os.environ and serves(self.config, rank):  # else it is not certain which rank this is
                return start_served(self.config, os.environ, self._host, local_rank)
        return None

    def _close_at_exit(self) -> None:
        """End with the interpreter, which keeps the exception that ended the script.

        At a prompt, and in pytest, which keeps that of a test there, it ended nothing.
        """
        goes_on = hasattr(sys, "ps1") or "pytest" in sys.modules
        self.close_by(None if goes_on else getattr(sys, "last_value", None))

    def close_by(self, error: BaseException | None) -> None:
        """Close because of the exception that ended the training; None for a normal end."""
        if error is None:
            self.close()
        elif isinstance(error, StopRun):
            self.close("stopped")
        elif isinstance(error, KeyboardInterrupt):
            self.close("interrupted", 130, error)
        else:
            self.close(f"exception: {text_of(error)}", 1, error)

    def forked(self) -> None:
        """Detach in a forked child, which is no rank. Its threads do not exist here: nothing is joined or freed."""
        self._closed = True
        self.probes.last_state.close()
        self.probes.remove()
        self.guard.run("close:hooks", self.probes.release)

    def _on_group(self) -> None:
        if dist.is_available() and dist.is_initialized():
            self.guard.run("exchange", self._rejoin if self._begun and self._exchange else self._begin)

    def _part(self, event: GroupEnds) -> None:
        """Leave the other ranks with the job's last process group: one of ours must not outlive it.

        Not where an exception is on its way: the others are to hear why this rank ends.
        """
        exchange = self._exchange
        if exchange is None or self.world == 1 or self._closed or not event.last:
            return
        patient, began = sys.exc_info()[1] is None, time.perf_counter()
        if patient:
            for watch in self.probes.state.watches:
                self.guard.run("forensics:elements", self.elements.last_look, watch)
            self.guard.run("forensics:agreement", self.agreement.run, self.probes.state.wrappers, -1, last=True)
            self._tell_end("finished")
        exchange.part(patient=patient)
        if exchange.apart:
            self.numeric_guard.meet((self.rank,))
        self.guard.forgive(time.perf_counter() - began)

    def _rejoin(self) -> None:
        """Meet the other ranks in the next process group."""
        assert self._exchange is not None
        if self._exchange.rejoin():
            self._promised = 0
            self.numeric_guard.meet(range(self.world))

    def _begin(self, *, alone: bool = False) -> None:
        """Learn who we are and start the exchange, once: the next call does what an interrupt has cut."""
        if self._begun:
            return
        be_brief()
        try:
            self._go_on_beginning(alone=alone)
        except Exception as error:
            self._begun = not is_users(error)
            raise
        self._begun = True

    def _go_on_beginning(self, *, alone: bool) -> None:
        if self._exchange is None:
            self._make_ready(alone=alone)
        assert self._exchange is not None
        if self._progress_watch is None:
            self._progress_watch = self._watch_progress()
        if self.rank == 0 and not self._has_sinks:
            self._open_sinks(self.directory or self.config.out or run_directory(self.run_id, utc_now()))
        while self._early:
            self._deliver(self._early.pop(0))
        if self._lost:
            self._exchange.lose(self._lost)
        else:
            self._exchange.start()
        self.covering.start()

    def _make_ready(self, *, alone: bool) -> None:
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        elif not alone:
            self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._lost = ""
        if self.world > 1:
            self._lost, expected = self.groups.open_store(), self.world
            if self.groups.store is None and not self._lost:
                self.rank, self.world = 0, 1
            self.covering.begin(self.rank, expected, self.groups.store, self.groups.prefix)
        if self.rank != 0 and os.environ.get("LOCAL_RANK") != "0":  # the environment may not have had the rank
            self._host.close()
        note(self._origin, self.rank)
        self.probes.meet(self.world)
        self.elements.rank, self.disk.ranks = self.rank, self.world
        self.numeric_guard.meet(range(self.world))
        self.memory.begin(self.rank, self.world)
        self._judging = self._new_judging()
        self.groups.rank, self.groups.world = self.rank, self.world
        self.groups.tree = None if self._judging.many is None else self._judging.many.tree
        connect, tick = contained(self._connect), contained(self._judge_tick)
        calls = connect, tick, contained(self._on_lost), self._back.tell, is_users
        self._exchange = self._make_exchange(*calls)

    def _make_exchange(self, *calls: Any) -> Exchange:
        kind = Exchange if self._judging.many is None else self._judging.many.exchange
        return kind(self.rank, self.world, *calls)

    def _new_judging(self) -> Judging:
        config = {**asdict(self.config), "world": self.world}
        outlets = Outlets(
            say=self._say,
            write=self._write,
            learn=self._learn,
            report=self._report,
            known=lambda: self.reporter.known,
            log=self._log,
            announce_again=self._announce_again,
            speak=self._stand_in,
            start=self._host.judge,
            trouble=self._trouble,
        )
        return Judging(self.rank, self.world, config, self._back, self.schedule, self._answering, outlets)

    def _log(self) -> Path | None:
        """Return the run directory, if what the ranks have sent in this run can be read there, and soon."""
        with suppress(ValueError, OSError):
            if self._home is not None and read_run(self._home)["run"] == self.run_id:
                return self._home if self.rank == 0 or bytes_of_log(self._home) <= _MOST_LOG else None
        return None

    def _watch_progress(self) -> ProgressWatch | None:
        if self.world == 1:
            return None
        threads, state = self.probes.entries.threads, self.probes.state
        if self.config.on_hang == "stop" or self.ends_hang is not None:
            self._hang_stop = HangStop(
                findings=lambda: self.findings,
                written=self._written_hangs,
                say=lambda hang: self._say("leave", hang=hang),
                leave=self._leave_by_hang,
            )
        self._beats = Beats(internals.private_store, self.groups.beats_prefix, self.rank)
        watcher = Watcher(
            self.rank,
            internals.Collectives(),
            members=internals.members_of_groups,
            thread=threads.watched,
            step=state.next_step,
            workers=self.probes.loaders.workers,
            notes=self.probes.collectives,
        )
        watch = self._make_progress_watch(
            self.rank,
            self.world,
            watcher,
            disk=self.disk,
            folder=lambda: self._home,
            say=self._say,
            announce=self._announce,
            feed=self._hear_own,
            stand_in=self._stand_in,
            tell=self._write,
            off=self._back.tell,
            beats=self._beats,
            hosts_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            stop=self._hang_stop,
        )
        self._back.when_off("progress", watch.went_off)
        return watch

    # --- meeting the other ranks, in the background thread ------------------------------------------------------------

    def _connect(self, generation: int, members: tuple[int, ...]) -> Group | Tree:
        if len(members) == 1:
            self._let_store_go()
        return self.groups.connect(generation, members)

    def _on_met(self, roll: RollCall) -> None:
        self._judging.meet()
        own = roll.settings
        self.schedule.follow(budget=own["~budget"], every_step=own["~every_step"])
        if self._judging.many is not None and not self.schedule.every_step:
            self._judging.many.limit(self.schedule.budget)
        for rank, identity in sorted(roll.identities.items()):
            for name in ("budget", "every_step"):
                value, ours = identity.get(f"~{name}"), own[f"~{name}"]
                if value != ours:
                    self._trouble(f"{name}={value} of rank {rank}", f"rank 0 has {ours}, and that holds for all")
        self.covering.connecting()
        self._back.run("run directory", self._join_run, own["~run"])
        if self._progress_watch is not None:  # from here on its black box tells of a rank
            self._back.run("progress", self._progress_watch.begin)

    def _connecting(self) -> AbstractContextManager[object]:
        return nullcontext() if self._progress_watch is None else self._progress_watch.connecting()

    def _join_run(self, run: Mapping[str, Any]) -> None:
        """Write where rank 0 does."""
        if self.fanout is None:
            self.run_id, self._door = str(run["run_id"]), str(run["door"])
            if os.environ.get("LOCAL_RANK") != "0":
                self._host.joins = self._door
            self._open_sinks(Path(str(run["directory"])))

    def _identity(self) -> dict[str, Any]:
        """Return what all ranks must have in common; what begins with `~` is for rank 0 to decide."""
        settings = {name: getattr(self.config, name) for name in _SHARED_SETTINGS}
        settings["ignore"] = list(self.config.ignore or ())  # as JSON has it
        return {
            "versions of ddpdebug": __version__,
            "layouts of rows": wire_format(),
            "versions of torch": torch.__version__.partition("+")[0],
            **{f"settings of {name}": dict(v) if isinstance(v, Mapping) else v for name, v in settings.items()},
            "~budget": self.config.budget,
            "~every_step": self.config.every_step,
            ADDRESS: self.groups.way_to_store(),
            "~neighbours": os.environ.get("LOCAL_WORLD_SIZE", ""),
            "~run": {"directory": str(self.directory or ""), "run_id": self.run_id, "door": self._door},
        }

    def _why_not_wait(self, missing: tuple[int, ...]) -> str | None:
        exchange = self._exchange
        assert exchange is not None
        exchange.missing = self.covering.missing = missing
        return exchange.unmet() if exchange.lost or exchange.impatient else None

    def _open_sinks(self, directory: Path) -> None:
        self.directory, self.reporter.run_id = directory, self.run_id
        with suppress(FileNotFoundError):  # the working directory is gone
            self._home = directory.absolute()
        self._home = self._home or directory
        who: dict[str, Any] = {"rank": self.rank, "world": self.world, "run_id": self.run_id, "time": utc()}
        who |= {"redactor": self.redactor, "disk": self.disk, "spawned": self._origin is not None}
        who |= {"host": self._host, "served": self._served, "door": self._door, "pusher": self._pusher}
        self.fanout, started = open_sinks(self.config, directory, self._home, **who)
        self._write(started)
        self.covering.opened()
        self.memory.flush()
        self._announce(Place(node=started.node, local_rank=started.local_rank, metrics=started.metrics_url))
        with self._writing:
            waiting, self._troubles = self._troubles, []
            self._has_sinks = True
        for trouble in waiting:
            self._write(trouble)

    @property
    def _is_apart(self) -> bool:
        return self._exchange is not None and self._exchange.apart

    @property
    def _is_waited_for(self) -> bool:
        """Whether the training thread waits until this rank has left the others."""
        return self._closed or (self._exchange is not None and self._exchange.parting)

    # --- the training thread ------------------------------------------------------------------------------------------

    def _emit(self, record: StepRecord) -> None:
        if self._closed:
            return
        self._begin()
        assert self._exchange is not None
        if not self._steps and (device := self.guard.run("probe:place", own_device)):
            self._announce(device)
        self._records.add(record)
        self._steps[record.optimizer] = record.step + 1
        self._exchange.progress = max(self._exchange.progress, record.step + 1)
        self._exchange.post(lambda: self._encode(record))

    def _passed(self, optimizer: int, step: int) -> None:
        """Note a step that has no row."""
        self._steps[optimizer] = step + 1
        if self._exchange is not None:
            self._exchange.progress = max(self._exchange.progress, step + 1)

    def _look_as_planned(self, event: StepPassed) -> None:
        """Take the looks that all ranks take at a step, though it has no row."""
        self.elements.capture(event.watch, event.step)
        self.agreement.run(self.probes.state.wrappers, event.step)

    def _emit_last(self, record: StepRecord) -> None:
        if self._exchange is not None:
            self._last.add(record)
            self._promised += 1
            self._exchange.post(lambda: self._encode(record))

    def _weigh(self, event: StepClosed) -> None:
        if event.record.step in _WEIGHED:
            self.disk.needed = max(self.disk.needed, checkpoint_bytes(self.probes.state))

    def _agree(self, event: StepClosed) -> None:
        """Let the ranks compare what they make of a batch, where that is due."""
        step, every = event.record.step, self.config.probe_every
        if event.record.optimizer == 0:
            if every and self.rank == 0 and step // every > self._offered:  # the first that is watched from there on
                self._offered = step // every
                self._offer()
            self.agreement.run(self.probes.state.wrappers, step)

    def _offer(self) -> None:
        """Let the ranks compare what they make of the newest forward's inputs."""
        wrappers = self.probes.state.wrappers
        capture = self.probes.captures.newest(wrappers[0].module() if wrappers else None)
        if capture is not None and not capture.lost():
            self.agreement.offer(capture.args)
        elif capture is not None and not self._unoffered:
            self._unoffered = True
            self.guard.tell("agreement probe", f"a step was left out: the inputs were not kept: {capture.lost()[0]}")

    def _stop_now(self) -> BaseException | None:
        taken = max(self._steps.values(), default=0)
        if self.config.steps is not None and taken >= self.config.steps:
            return StopRun(self.config.steps)
        error: BaseException | None = next(iter(self._plans.take("stop", taken)), None)
        return error  # once; the user may catch it

    def _announce(self, announcement: Announcement, number: int | None = None) -> None:
        self._say("fact", topic=topic_text(announcement, number), value=announcement)

    def _say(self, kind: str, **fields: Any) -> bool:
        return bool(self.guard.contain("exchange:say", self._send, kind, **fields))

    def _send(self, kind: str, /, **fields: Any) -> bool:
        try:
            message = {"kind": kind, **to_json(fields)}
        except RecursionError as error:
            if is_users(error):
                raise
            message = {"kind": kind, **fields}  # circular: the exchange tells of this message, and the others go on
        if self._exchange is None:
            self._early.append(message)
            return True
        return self._deliver(message)

    def _deliver(self, message: dict[str, Any]) -> bool:
        assert self._exchange is not None
        topic = str(message.get("topic")) if message["kind"] == "fact" else ""
        of_few = topic not in _FOR_ALL if topic else message["kind"] in _REPORTS
        if topic and of_few and scope_of(topic) is Scope.ALL_RANKS:
            self._announced[topic] = message
        return self._exchange.say(message, report=of_few)

    def _announce_again(self) -> None:
        """Send the rank that judges from then on what the one before knew of this rank."""
        for message in list(self._announced.values()):
            self._deliver(message)

    def _account(self) -> RankCoverage:
        """Return what this rank looked at; reads only, from any thread."""
        counts = self._counts
        return RankCoverage(
            rank=self.rank,
            steps=max(dict(self._steps).values(), default=0),
            made=counts.made,
            by_hand=self.probes.recorder.by_hand,
            backwards=self.probes.state.backwards,
            wrappers=len(self.probes.state.wrappers),
            parameters=counts.parameters,
            unwatched=dict(counts.unwatched),
            left_out=dict(counts.left_out),
            off=dict(self.covering.off),
            children=0 if self.starts is not None and self.starts.any_ranks else counts.children,
            evaluations=self.probes.evaluations.without_loss,
            replayed=counts.replayed,
            sharding=next(iter([w.sharding.text for w in tuple(self.probes.state.watches) if w.sharding]), ""),
        )

    def _on_child(self, fresh: bool) -> None:  # noqa: FBT001 - what happened
        if fresh:  # beside a fork no thread is started
            self.covering.start()

    # --- the background thread ----------------------------------------------------------------------------------------

    def _encode(self, record: StepRecord) -> bytes:
        try:
            workers = self._back.contain("probe:memory", lambda: private_bytes(self.probes.loaders.workers()))
            record.fields["workers_bytes"] = workers or 0
            spent = time.thread_time()
            record.fields["overhead_seconds"] += spent - self._thread_seconds
            self._thread_seconds = spent
            row, many = encode_row(record, self.rank, self._back), self._judging.many
            return row if many is None else many.rows.add(row)
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for this row: send what is certain
            self._back.fail("probe:row", error)
            flags = int(record.flags & Flag.LAST_STATE)
            return encode(Row(rank=self.rank, step=record.step, optimizer=record.optimizer, flags=flags))

    def _on_tick(self, tick: Tick) -> bool:
        """Take what all ranks have said and seen. A part that fails is off, and the others go on.

        What all ranks must do alike at a step (a stop) is asked for by message, so that a rank whose own diagnosis is
        off does it as well.
        """
        run = self._back.run
        judging = self._judging
        judging.progress = tick.progress
        self.covering.ticked(len(tick.members))
        for ranks, message in (*tick.reports, *tick.messages):  # who fails says last that it has
            kind = str(message.get("kind"))
            if kind in _MESSAGES:
                run(f"message:{kind}", self._hear, ranks, kind, message)
        if self._progress_watch is not None:
            run("progress", self._progress_watch.tick, tick.members)
        self._keep_voting()
        self._tell_met(Met(members=tick.members, apart=tick.apart))
        self._members = len(tick.members)
        if not self._is_apart:
            self.numeric_guard.meet(tick.members)
        judging.take(tick)
        judging.conclude()
        self._answering.work(patient=not self._is_waited_for)
        run("forensics:elements", self.elements.tick)
        return judging.busy or (self.elements.busy and "forensics:elements" not in self._back.off)

    def _tell_met(self, met: Met) -> None:
        """Write down who takes part and how far they are apart: when it changes, and every few seconds."""
        now = time.monotonic()
        if self.fanout is not None and (met != self._met[0] or now - self._met[1] >= _MET_SECONDS):
            self._met = met, now
            self._write(met)

    def _keep_voting(self) -> None:
        """Leave the votes of the numeric guard where this rank cannot count them, and tell those who would wait."""
        if "message:vote" in self._back.off and not self._unguarded:
            self._unguarded = True
            self.numeric_guard.lost()
            self._say("unguarded")

    def _learn(self, *steps: Step) -> None:
        def each(learn: Callable[..., object], *more: Any) -> None:
            for step in steps:
                learn(step, *more)

        run = self._back.run
        if not self._is_apart:  # all ranks must come to the same
            run("schedule", each, self.schedule.learn, self._judging.progress)
        run("coverage", each, self.covering.judged)
        run("forensics:holders", each, self.memory.holder_search.learn)

    def _hear(self, ranks: Sequence[int], kind: str, message: Mapping[str, Any]) -> None:
        """Take a message, which several ranks of very many may have said in the same words."""
        if kind == "detail":
            self._judging.hear_detail(ranks, message)
        elif kind == "fact":
            announcement = read_announcement(str(message["topic"]), message["value"])
            if ranks == (self.rank,) and isinstance(announcement, Hang) and self._knows(announcement):
                return  # heard when it was judged, and the others could not
            for rank in ranks:
                self._hear_fact(rank, str(message["topic"]), announcement)
        elif not self._judging.hear_judge(ranks, kind, message):
            for rank in ranks[:1] if kind == "waits" else ranks:
                self._hear_one(rank, kind, message)
        if kind in {"detail", "fact"}:
            several = {"ranks": list(ranks)} if len(ranks) > 1 else {}
            self._write(Saved(kind=kind, payload={"rank": ranks[0], **several, **message}))

    def _hear_one(self, rank: int, kind: str, message: Mapping[str, Any]) -> None:
        run = self._back.run
        if kind in _OF_HANGS and self._progress_watch is not None:
            run("progress", self._progress_watch.hear, rank, kind, message)
        elif kind == "trouble" and self.rank == 0 and rank != 0:
            self._write(Trouble(part=f"{message['part']} of rank {rank}", message=str(message["message"])))
        else:
            self._hear_plan(rank, kind, message)

    def _hear_fact(self, rank: int, topic: str, announcement: Announcement | None) -> None:
        run = self._back.run
        if topic == Failure.topic and rank == self.rank:
            self._failure = None
        if self._progress_watch is not None:
            run("progress", self._progress_watch.hear_of, rank, announcement)
        self._judging.hear_announcement(rank, topic, announcement)
        run("forensics:memory", self.memory.hear, rank, announcement)
        if isinstance(announcement, HangOver):
            self._note_over(announcement)
        if isinstance(announcement, RankCoverage):
            run("coverage", self.covering.hear, rank, announcement)

    def _hear_plan(self, rank: int, kind: str, message: Mapping[str, Any]) -> None:
        """Take what leads to something that the training thread does."""
        if kind == "vote":
            self.numeric_guard.hear(rank, message)
        elif kind == "unguarded":
            self.numeric_guard.lost()
        elif kind == "agree":
            self.agreement.hear(message, self._judging.progress + self.schedule.ahead(_LOOK_SECONDS))
        elif kind == "element":
            found = self.elements.hear(rank, message, self._members)
            if found is not None:
                self._locate(*found)
        elif kind == "stop":
            self._plan_stop(message)
        elif kind == "leave" and self._hang_stop is not None:
            self._hang_stop.hear(rank, str(message["hang"]))

    # --- hangs --------------------------------------------------------------------------------------------------------

    def _on_silence(self, seconds: float) -> None:
        if self._progress_watch is not None:
            self._back.run("progress", self._progress_watch.unanswered, seconds)

    def _judge_tick(self, tick: Tick) -> bool:
        with self._judging.lock:
            return self._on_tick(tick)

    def _hear_own(self, announcement: Announcement) -> None:
        """Judge by an announcement of this rank's at once: the others cannot hear it now.

        Nothing else is judged: they would have to do it in the same tick.
        """
        value = {"topic": announcement.topic, "value": to_json(announcement)}
        with self._judging.lock:
            self._judging.hear_itself()
            self._back.run("message:fact", self._hear, (self.rank,), "fact", value)
            self._judging.report_news()

    def _knows(self, hang: Hang) -> bool:
        return self._progress_watch is not None and self._progress_watch.knows(hang)

    def _note_over(self, over: HangOver) -> None:
        """Add to a hang how long it has lasted."""
        for finding in self.findings:
            if finding.evidence.get("hang") == f"{over.judge}:{over.number}":
                self.reporter.add(key_of(finding), {ENDED: over.seconds})

    def _written_hangs(self) -> list[Finding]:
        """Return the hangs of this run that another rank has written down since this one began."""
        if self._home is None:
            return []
        found = (finding for finding in read_findings(self._home) if is_hang(finding) and finding.run == self.run_id)
        return [finding for finding in found if (finding.time or "") >= self._began]

    def _leave_by_hang(self, finding: Finding, seconds: float) -> None:
        """End this process, once what it knows is written down; see `hang_stop.py` for why nothing is shut down."""
        if self._closed:  # it ends by itself
            return
        self._leaving, until = True, time.monotonic() + seconds
        leave_in_time()
        with suppress(Exception):  # whatever fails here, the process leaves
            self._keep_evidence(finding)
        with suppress(Exception):
            end_children()
        time.sleep(max(0.0, until - time.monotonic()))
        if self.ends_hang is not None:
            self.ends_hang(finding)
        with suppress(OSError):  # not through `sys.stderr`: the training thread may have its lock
            put(2, f"{line_of(finding, self.rank)}\n".encode("utf-8", "backslashreplace"))
        with suppress(Exception):  # what the script has printed; where that blocks, the process leaves in time
            sys.stdout.flush()
        os._exit(EXIT_STATUS)

    def _follow(self, reason: str) -> None:
        """Leave as others have because of a hang, whose end has thrown the script out of its collective."""
        if self._hang_stop is None or self._home is None or not is_victims(reason):
            return
        gone = any([is_by_hang(outcome["reason"]) for outcome in read_outcomes(self._home).values()])
        finding = self._hang_stop.standing() if gone else None
        if finding is not None:
            self._leave_by_hang(finding, 0.0)

    def _keep_evidence(self, finding: Finding) -> None:
        """Write down where the threads are, the hang where no rank has, and how this rank ends."""
        reason = reason_of(finding)
        if self._home is not None:
            stacks.write_now(self._home / RANKS / str(self.rank) / STACKS, self.disk)
            if name_of(finding) not in {name_of(known) for known in read_findings(self._home)}:
                OwnFindings(self._home, self.rank, self.disk).write(FindingRaised(finding=finding))
        if self._progress_watch is not None:
            self._progress_watch.note_end(reason)
        ended = RunEnded(reason=reason, exit_code=EXIT_STATUS, steps=dict(self._steps), time=utc())
        self._write(ended)
        if self.fanout is not None:
            self.fanout.close()
        self._host.close()
        if self._pusher is not None:
            self._pusher.close()

    def _stand_in(self) -> None:
        """Say what rank 0 cannot."""
        if self.fanout is not None and self._home is not None and not self._stands_in:
            self._stands_in = True
            sinks = stand_in(self._home, self.rank, self.disk, self._says, quiet=self.config.quiet)
            self.fanout.add(sinks)

    def _says(self, finding: Finding) -> bool:
        """Return whether a finding is this rank's to report in the place of rank 0, which has not reported it."""
        judging, home, name = self._judging, self._home, finding.id
        if finding.code.startswith("HANG"):
            return True
        if not (judging.succeeds and judging.judges and home is not None) or self._is_apart or name in self._said:
            return False
        if name not in self._ours:
            self._said |= {known.id for known in read_findings(home)} - self._ours  # it may have found it at its end
        if name not in self._said:
            self._ours |= {name}
        return name in self._ours

    def _report(self, raised: Sequence[tuple[Finding, bool]], progress: int) -> None:
        run = self._back.run
        for finding in self.reporter.report(raised):
            run("forensics:elements", self._search_element, finding, progress)
            run("step-vote", self.numeric_guard.found, finding)
            if finding.severity >= Severity.WARNING and not (self._closed or self._is_apart):
                run("schedule", self.schedule.bring_forward, progress)  # what else is wrong by now
            # because of a hang `--on-hang` ends a job, where it stands: this one may be over as the others hear of it
            if self.config.on_finding == "raise" and finding.severity >= Severity.ERROR and not is_hang(finding):
                ahead = self.schedule.ahead(_STOP_SECONDS)
                self._say("stop", finding=finding.to_json(), key=key_of(finding), ahead=ahead)

    def _plan_stop(self, message: Mapping[str, Any]) -> None:
        """Plan what the first rank to ask for it has asked for; all ranks hear it in the same tick."""
        if self._stopping or self.config.on_finding != "raise":
            return
        own = (finding for finding in self.findings if key_of(finding) == message["key"])
        finding = next(own, None) or Finding.from_json(str(message["finding"]))
        self._plans.add("stop", self._judging.progress + int(message["ahead"]), FindingError(finding))
        self._stopping = True

    def _judge_rest(self) -> None:
        """Judge what is left; the thread has ended, and what belonged to it is the caller's."""
        lost = self._exchange is not None and self._exchange.lost
        if lost and self._failure is not None:  # it ended the exchange, or came after its end: nobody has heard it
            value = {"topic": Failure.topic, "value": to_json(self._failure)}
            self._judging.hear_itself()
            self._back.run("message:fact", self._hear, (self.rank,), "fact", value)
        self._judging.rest(lost=lost)

    def _search_element(self, finding: Finding, progress: int) -> None:
        """Plan the search for the first differing element of a parameter; alike on all ranks."""
        if finding.code != "RANK101" or "values" in finding.evidence:
            return
        tables = [(watch.index, {name for name, *_ in watch.table}) for watch in tuple(self.probes.state.watches)]
        names = [(index, name) for index, table in tables for name in finding.subject if name in table]
        if names:
            optimizer, name = names[0]
            self.elements.begin(key_of(finding), optimizer, name, progress + self.schedule.ahead(_LOOK_SECONDS))
            if self._is_waited_for:  # no step comes, and the parameters are still there
                watch = next(
                    iter([w for w in reversed(self.probes.state.watches) if w.index == optimizer and w.names]), None
                )
                self.elements.last_look(watch) if watch is not None else self.elements.miss(key_of(finding))

    def _locate(self, key: str, evidence: dict[str, Any]) -> None:
        """Add the differing element to the finding it belongs to."""
        flat, name = int(evidence.pop("flat_index")), str(evidence["element_of"])
        rows = (row for watch in tuple(self.probes.state.watches) for row in watch.table)
        shape = next(iter([tuple(row[1].shape) for row in rows if row[0] == name]), None)
        index = {} if shape is None else {"index": unravel(flat, shape)}  # the parameter may be gone by now
        self.reporter.add(key, {**index, **evidence})

    def _on_lost(self, reason: str) -> None:
        self._write(Met(members=()))
        self.numeric_guard.lost()
        self.covering.lost(reason)
        if self._progress_watch is not None and not self._closed:
            self._progress_watch.lost()
        if not self._closed:
            self._trouble("exchange", f"the ranks can no longer be compared: {reason}")

    def _trouble(self, part: str, message: str) -> None:
        trouble = Trouble(part=part, message=message)
        if part != "exchange":  # that one is known in more detail
            self.covering.off[part] = message
        if self.rank != 0:
            self._say("trouble", part=part, message=message)  # rank 0 is the one that people see
        with self._writing:
            if not self._has_sinks:
                self._troubles.append(trouble)
                return
        self._write(trouble)

    def _device_failed(self) -> None:
        """Keep for ever what may hold memory of a device, and report once that nothing of it is read any more."""
        devices.keep(self)
        self._trouble("device", f"the device has failed, and nothing is read from it any more ({devices.failure.text})")

    def _write(self, record: Record) -> None:
        if self.fanout is not None and self._progress_watch is not None:
            with self._progress_watch.writing():
                self.guard.contain("sinks", self.fanout.write, record)
        elif self.fanout is not None:
            self.guard.contain("sinks", self.fanout.write, record)
