"""The wiring: probes -> rows -> exchange -> steps -> detectors -> findings -> sinks. The only object with state."""

from __future__ import annotations

import datetime
import itertools
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from ddpdebug import torch_internals as internals
from ddpdebug.assembly import Assembler
from ddpdebug.config import Config, run_directory
from ddpdebug.diagnosis import Diagnosis
from ddpdebug.errors import FindingError, StopRun, text_of
from ddpdebug.exchange import Alone, Exchange, Group, Tick
from ddpdebug.findings import Finding, Severity
from ddpdebug.forensics.agreement import AgreementProbe
from ddpdebug.forensics.elements import Elements
from ddpdebug.forensics.memory import MemoryForensics
from ddpdebug.forensics.numerics import Investigator
from ddpdebug.numeric_guard import NumericGuard
from ddpdebug.observations import Row, decode, encode
from ddpdebug.probes.answering import Answering
from ddpdebug.probes.guard import Guard, contained, is_users
from ddpdebug.probes.loaders import Loaders
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.patches import Patches
from ddpdebug.probes.place import gpu_uuid, place
from ddpdebug.probes.record import StepRecord, encode_row
from ddpdebug.probes.recorder import Recorder
from ddpdebug.reporting import Reporter, key_of, unravel, utc
from ddpdebug.schedule import Schedule
from ddpdebug.sinks import Record, RunEnded, Saved, StepJudged, Trouble
from ddpdebug.sinks.assembled import open_sinks
from ddpdebug.sinks.fanout import Fanout

_RING_STEPS = 256
#: As long as the job's own process groups wait by default: a rank that is stopped for a while is not lost.
_GROUP_TIMEOUT = datetime.timedelta(minutes=30)
#: What all ranks do at the same step is agreed on so long ahead of the fastest rank: a stop, and a look.
_STOP_SECONDS, _LOOK_SECONDS = 0.5, 0.1
#: The ranks' n-th monitors belong together and must not find the keys of earlier ones in the store.
_NUMBERS = itertools.count()


class Monitor:
    """Watches one process of a job. Made by `install` (commands) or `watch` (Python); `close` ends it.

    Args:
        config: the settings, already validated.
        command: what runs, for the records.
    """

    def __init__(self, config: Config, command: Sequence[str] = ()) -> None:
        self.config, self.command = config, tuple(command)
        self.rank, self.world, self._number = 0, 1, next(_NUMBERS)
        self.run_id = os.environ.get("DDPDEBUG_RUN_ID") or secrets.token_hex(3)
        self.reporter = Reporter(self._write, utc)
        self.schedule = Schedule(budget=config.budget, every_step=config.every_step)
        self.guard = Guard(self._trouble)
        self.recorder = Recorder(self.guard, self._emit, self._announce, self.schedule.due, 1)
        self.loaders = Loaders(self.recorder, self._announce)
        self.patches = Patches(self.recorder, self.loaders, self._on_group)
        self.recorder.adopt = self.patches.adopt
        self.fanout: Fanout | None = None
        self.directory: Path | None = None
        self._exchange: Exchange | None = None
        self._store: Any = None
        self._early: list[dict[str, Any]] = []  # announcements made before the ranks could talk
        self._troubles: list[Trouble] = []
        self._ring: deque[StepRecord] = deque(maxlen=_RING_STEPS)
        self._steps: dict[int, int] = {}
        self._thread_seconds, self._closed = 0.0, False
        self._stop_at: tuple[int, BaseException] | None = None
        self._pid = os.getpid()
        self.recorder.stop = self._stop_now
        self.recorder.keep_inputs = bool(config.probe_every)
        self.recorder.want_norms = config.tolerance is not None
        self.numeric_guard = NumericGuard(config.guard, config.max_skips, self._say, self._trouble)
        self.recorder.guard_with(None if config.guard == "off" else self.numeric_guard)
        self.investigator = Investigator(
            self.recorder,
            lambda: (self.rank, self.directory),
            limit=config.bundle_limit << 20,
            facts={"command": list(self.command), "run": self.run_id},
        )
        self.elements = Elements(0, self._say)
        self.agreement = AgreementProbe(self._say, self._announce)
        self.recorder.after_step = self._after_step
        self.recorder.last_look = partial(self.guard.run, "forensics:elements", self.elements.last_look)
        self.memory = MemoryForensics(self.recorder, self.reporter.add_to, self._announce, lambda: self.directory)
        self._members, self._progress = 1, 0
        self._answering = Answering(self.recorder, self._ring, self._say)
        self._assembler, self._diagnosis = Assembler(1), Diagnosis(world=1)

    # --- public -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Tell whether `close` was called."""
        return self._closed

    def observe(self, **values: Any) -> None:
        """Tell what hooks cannot see: `loss` (a scalar tensor or number), `val_loss`."""
        unknown = sorted(values.keys() - {"loss", "val_loss"})
        if unknown:
            raise ValueError(f"observe() got {unknown[0]!r}; valid are 'loss' and 'val_loss'")
        for name, value in values.items():
            if value is not None:
                self.guard.run("probe:observe", self.recorder.events.observed, name, value)

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, oldest first."""
        return self.reporter.findings

    def watch_replica(self, name: str, module: torch.nn.Module) -> None:
        """Compare a module outside DDP (EMA, teacher) between ranks, as RANK113, under the given name."""
        self.recorder.replicas.add(name, module)

    def expect_growth(self, what: str, size: int | None = None) -> None:
        """Declare memory that grows on purpose (a replay buffer), by `size` bytes at most; None is without a limit."""
        self.memory.expect(what, size)

    def agree(self, *batch: Any) -> None:
        """Feed rank 0's `batch` (the arguments of forward) to every rank soon; if the outputs differ, it is RANK107.

        Raises:
            ValueError: the batch is too large or holds something other than tensors and plain values.
        """
        if self.rank == 0:
            self.agreement.offer(batch)

    def close(self, reason: str = "finished", exit_code: int | None = 0) -> None:
        """Deliver what is queued, write the outcome and take all hooks away. Idempotent; takes 5 s at most."""
        if self._closed or os.getpid() != self._pid:
            return
        run = self.guard.run
        run("close:memory", self.memory.close, sys.exc_info()[1])
        self._closed = True
        run("close:optimizers", self._last_looks)
        run("forensics:agreement", self.agreement.run, self.recorder.wrappers, -1, last=True)
        whole = reason == "finished" and (bool(self.command) or run("close:loaders", lambda: self.loaders.repeated))
        self.patches.remove(finished=bool(whole))  # of a script, or of an epoch
        run("close:hooks", self.recorder.release)
        run("close:exchange", self._leave, reason)
        self.guard.contain("close:end", self._end, reason, exit_code)
        if self.fanout is not None:
            self.guard.contain("close:sinks", self.fanout.close)

    def _last_looks(self) -> None:
        for watch in self.recorder.watches:
            self.recorder.last_look(watch)

    def _end(self, reason: str, exit_code: int | None) -> None:
        self._write(RunEnded(reason=reason, exit_code=exit_code, steps=dict(self._steps), time=utc()))

    def _leave(self, reason: str) -> None:
        if self._exchange is None and (self._steps or self.command):
            self._begin(alone=True)
        if reason.startswith("exception") and self._ring:
            newest = self._ring[-1]
            fact = {"reason": reason, "step": newest.step, "missing": list(newest.missing)}
            self._announce("alone:failure", fact)
        self._say("fact", topic="end", value={"steps": self._steps, "reason": reason})
        if self._exchange is None or self._exchange.close():
            self._judge_rest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close("finished" if error is None else f"exception: {text_of(error)}")

    # --- start --------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the hooks in place; from here on training is seen."""
        if lacking := internals.missing():
            self._trouble("torch", f"this torch lacks {', '.join(lacking)}; some checks are off")
        self.guard.run("patches", self.patches.install)
        self.guard.run("memory", self.memory.install, self.config)
        entries = self.recorder.entries
        entries.at_exit("close", self.close)
        entries.in_child("close:child", self.forked)
        self._on_group()

    def forked(self) -> None:
        """Let go in a forked child, which is not the rank; nothing is freed, its threads are not here."""
        self._closed = True
        self.patches.remove()
        self.guard.run("close:hooks", self.recorder.release)

    def _on_group(self) -> None:
        if self._exchange is None and dist.is_available() and dist.is_initialized():
            self.guard.run("exchange", self._begin)

    def _begin(self, *, alone: bool = False) -> None:
        """Learn who we are and start the exchange."""
        if self._exchange is not None:
            return
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        elif not alone:
            self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if self.world > 1:
            self._store = internals.private_store()
            if self._store is None:
                self.rank, self.world = 0, 1
        self.recorder.world, self.elements.rank = self.world, self.rank
        self.numeric_guard.meet(range(self.world))
        self.memory.begin(self.rank, self.world)
        config = {**asdict(self.config), "world": self.world}
        self._diagnosis = Diagnosis(world=self.world, config=config, on_trouble=self._trouble)
        self._assembler = Assembler(self.world)
        self._exchange = Exchange(
            self.rank, self.world, contained(self._connect), contained(self._on_tick), contained(self._on_lost)
        )
        if self.rank == 0:
            self._open_sinks(self.config.out or run_directory(self.run_id, datetime.datetime.now(datetime.UTC)))
            self._say("run", directory=str(self.directory or ""), run_id=self.run_id)
        while self._early:
            self._exchange.say(self._early.pop(0))
        self._exchange.start()

    def _connect(self, generation: int, members: tuple[int, ...]) -> Group:
        if len(members) == 1:
            return Alone()
        prefix, rank = f"ddpdebug/{self._number}/group/{generation}", members.index(self.rank)
        exchange = self._exchange
        assert exchange is not None
        internals.meet(self._store, prefix, rank, len(members), lambda: exchange.impatient)
        return internals.GlooGroup(self._store, prefix, rank, len(members), _GROUP_TIMEOUT)

    def _open_sinks(self, directory: Path) -> None:
        self.directory, self.reporter.run_id = directory, self.run_id
        who: dict[str, Any] = {"rank": self.rank, "world": self.world, "run_id": self.run_id}
        self.fanout, started = open_sinks(self.config, directory, **who, command=self.command, time=utc())
        self._write(started)
        self.memory.flush()
        self._announce("place", place(started))
        while self._troubles:
            self._write(self._troubles.pop(0))

    # --- the training thread ------------------------------------------------------------------------------------------

    def _emit(self, record: StepRecord) -> None:
        if self._closed:
            return
        if self._exchange is None:
            self._begin()
        assert self._exchange is not None
        if not self._steps and (gpu := self.guard.run("probe:place", gpu_uuid)):
            self._announce("place", {"gpu_uuid": gpu})
        self._ring.append(record)
        self._steps[record.optimizer] = record.step + 1
        self._exchange.progress = max(self._exchange.progress, record.step + 1)
        self._exchange.post(lambda: self._encode(record))

    def _after_step(self, watch: OptimizerWatch, step: int) -> None:
        self.guard.run("forensics:elements", self.elements.capture, watch, step)
        if watch.index == 0:
            every = self.config.probe_every
            if every and step % every == 0 and self.rank == 0 and self.recorder.last_inputs:
                self.guard.run("forensics:agreement", self.agreement.offer, self.recorder.last_inputs)
            self.guard.run("forensics:agreement", self.agreement.run, self.recorder.wrappers, step)

    def _stop_now(self) -> BaseException | None:
        taken = max(self._steps.values(), default=0)
        if self.config.steps is not None and taken >= self.config.steps:
            return StopRun(self.config.steps)
        if self._stop_at is None or taken < self._stop_at[0]:
            return None
        error, self._stop_at = self._stop_at[1], (sys.maxsize, self._stop_at[1])  # once; the user may catch it
        return error

    def _announce(self, topic: str, value: Any) -> None:
        self._say("fact", topic=topic, value=value)

    def _say(self, kind: str, **fields: Any) -> None:
        self.guard.contain("exchange:say", self._send, kind, **fields)

    def _send(self, kind: str, /, **fields: Any) -> None:
        message = {"kind": kind, **fields}
        if self._exchange is None:
            self._early.append(message)
        else:
            self._exchange.say(message)

    # --- the background thread ----------------------------------------------------------------------------------------

    def _encode(self, record: StepRecord) -> bytes:
        record.fields["workers_bytes"] = self.recorder.memory.workers_bytes()
        spent = time.thread_time()
        record.fields["overhead_seconds"] += spent - self._thread_seconds
        self._thread_seconds = spent
        try:
            return encode(encode_row(record, self.rank))
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for this row: send what is certain
            self.guard.fail("probe:row", error)
            return encode(Row(rank=self.rank, step=record.step, optimizer=record.optimizer, flags=0))

    def _on_tick(self, tick: Tick) -> bool:
        self._progress = tick.progress
        for rank, message in tick.messages:
            self._hear(rank, message)
        for rank, data in tick.rows:
            self._assembler.add(rank, decode(data))
        self._members = len(tick.members)
        self.numeric_guard.meet(tick.members)
        self._assembler.set_members(tick.members)
        for step in self._assembler.ready():
            self._judge(step)
        self._report(self._diagnosis.tick(), tick.progress)
        self._answering.ask(self._diagnosis.requests())
        self._answering.work(patient=not self._closed)
        self.guard.run("forensics:elements", self.elements.tick)
        return self._diagnosis.busy or self.elements.busy

    def _judge(self, step: Any) -> None:
        self.schedule.learn(step)
        self.memory.hunt.learn(step)
        self._answering.ask(self._diagnosis.feed(step))
        interval = 1 if self.config.every_step else self.schedule.interval(step.step)
        self._write(StepJudged(step=step, interval=interval, overhead_ratio=self.schedule.ratio))

    def _hear(self, rank: int, message: Mapping[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "detail":
            place = int(message["optimizer"]), int(message["step"])
            self._diagnosis.answer(rank, *place, str(message["detail"]), message["value"])
        elif kind == "fact":
            self._diagnosis.tell(str(message["topic"]), rank, message["value"])
            self.memory.hear(rank, message)
        elif kind == "vote":
            self.numeric_guard.hear(rank, message)
        elif kind == "agree":
            ahead = self._progress + self.schedule.ahead(_LOOK_SECONDS)
            self.guard.run("forensics:agreement", self.agreement.hear, message, ahead)
        elif kind == "element":
            found = self.elements.hear(rank, message, self._members)
            if found is not None:
                self._locate(*found)
        elif kind == "trouble" and self.rank == 0 and rank != 0:
            self._write(Trouble(part=f"{message['part']} of rank {rank}", message=str(message["message"])))
        elif kind == "run" and self.fanout is None:
            self.run_id = str(message["run_id"])
            self._open_sinks(Path(str(message["directory"])))
        if kind in {"detail", "fact"}:
            self._write(Saved(kind=str(kind), payload={"rank": rank, **message}))

    def _report(self, raised: Sequence[tuple[Finding, bool]], progress: int) -> None:
        for finding in self.reporter.report(raised):
            self._hunt(finding, progress)
            self.numeric_guard.found(finding)
            if self.config.on_finding == "raise" and finding.severity >= Severity.ERROR and self._stop_at is None:
                self._stop_at = (progress + self.schedule.ahead(_STOP_SECONDS), FindingError(finding))

    def _judge_rest(self) -> None:
        try:
            for step in self._assembler.rest():
                self._judge(step)
            self._report(self._diagnosis.finish(), 0)
        except Exception as error:
            if is_users(error):
                raise
            self.guard.tell("diagnosis", text_of(error))

    def _hunt(self, finding: Finding, progress: int) -> None:
        """Plan the search for the first differing element of a parameter; alike on all ranks."""
        names = [(w.index, name) for w in self.recorder.watches for name in finding.subject if name in w.names]
        if finding.code == "RANK101" and names and "values" not in finding.evidence:
            optimizer, name = names[0]
            self.elements.begin(key_of(finding), optimizer, name, progress + self.schedule.ahead(_LOOK_SECONDS))

    def _locate(self, key: str, evidence: dict[str, Any]) -> None:
        """Add the differing element to the finding it belongs to."""
        flat, name = int(evidence.pop("flat_index")), str(evidence["element_of"])
        tables = ((n, p) for w in self.recorder.watches for n, p in zip(w.names, w.params, strict=True))
        shape = next(tuple(p.shape) for n, p in tables if n == name)
        self.reporter.add(key, {"index": unravel(flat, shape), **evidence})

    def _on_lost(self, reason: str) -> None:
        self.numeric_guard.lost()
        if not self._closed:
            self._trouble("exchange", f"the ranks can no longer be compared: {reason}")

    def _trouble(self, part: str, message: str) -> None:
        trouble = Trouble(part=part, message=message)
        if self.rank != 0:
            self._say("trouble", part=part, message=message)  # rank 0 is the one that people see
        if self.fanout is None:
            self._troubles.append(trouble)
        else:
            self._write(trouble)

    def _write(self, record: Record) -> None:
        if self.fanout is not None:
            self.guard.contain("sinks", self.fanout.write, record)
