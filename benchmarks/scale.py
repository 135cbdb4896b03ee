"""What very many ranks cost each of them: thousands as light objects around the classes that a job runs.

    python benchmarks/scale.py [--worlds 64,1024,8192] [--steps 16] [--meeting] [--process 1024]

Every rank of a world has its real row, its real place in the tree and what its real classes make of it; only gloo is
not there: bytes go from hand to hand in one thread. Printed are processor times for a step (the least of the rounds,
for the machine has other work), the bytes that come into a rank for a healthy step, connections, and what the rank that
judges keeps.

With `--meeting` the ranks of each world meet, as threads, and what they ask of the store is counted; what that takes
is the number by the time of one such call to a TCPStore, alone. With `--talk` the ranks of each world are processes
that talk over gloo, flat and over the tree, and judge healthy steps: small worlds only. With `--process` real
processes train in turn, so that all see the same machine: plain, plain again, which is the noise, as one of two
ranks, and as a rank of so many that judges, or does not. What comes from the others another process makes, and of two
ranks the other says what this one does. Printed are ratios to the plain process in the same round: the median of the
rounds, and the quartiles.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import math
import multiprocessing
import os
import random
import statistics
import struct
import tempfile
import threading
import time
import tracemalloc
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore, HashStore, TCPStore

from ddpdebug.config.settings import Config
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.diagnosis.reporter import Reporter, utc
from ddpdebug.exchange.meeting import RollCall
from ddpdebug.exchange.partial import Message, Partial, StepPart, set_of
from ddpdebug.exchange.step_assembler import Assembler, fault_of
from ddpdebug.exchange.ticks import BATCH_ROWS, IDLE_SECONDS, Group, Tick
from ddpdebug.exchange.tree import Circle, Tree, circles, packed, unpacked
from ddpdebug.monitor.many_ranks import Calls, ManyRanks, PartAssembler, chosen_step, fault_of_part
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.monitor.sampling import Schedule
from ddpdebug.run_directory.reader import FINDINGS
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.announcements import read_announcement
from ddpdebug.schema.row import DIGESTS, LAYOUT_VERSION, ROW_BYTES, Flag, Row, decode, encode
from ddpdebug.sinks import RunStarted
from ddpdebug.torch_internals import GlooGroup

#: Of processes that talk.
_TIMEOUT, _HEADER_BYTES = datetime.timedelta(minutes=5), 40
_OF_ONE = ("batch_digest", "record_digest", "output_digest", "rng_digest")


def row(rank: int, step: int, draw: random.Random) -> bytes:
    """Return the row of a rank in a checked step of healthy training."""
    fields: dict[str, Any] = {
        name: hash((name, step)) & ((1 << 63) - 1) for name in DIGESTS if not name.startswith("eval")
    }
    fields |= {name: draw.getrandbits(63) for name in _OF_ONE}
    for slot in range(8):
        fields |= {f"local_sum_{slot}": draw.gauss(0, 1), f"local_norm_{slot}": draw.random()}
        fields[f"reduced_sum_{slot}"] = (hash((step, slot)) % 1000) / 7
    fields |= {"step_seconds": draw.gauss(0.25, 0.01), "data_seconds": 0.01, "forward_seconds": 0.08}
    fields |= {"backward_seconds": 0.14, "backward_local_seconds": draw.gauss(0.12, 0.005), "optimizer_seconds": 0.01}
    fields |= {"sync_wait_seconds": 0.02, "collective_seconds": 0.0, "overhead_seconds": 0.002, "cpu_seconds": 0.24}
    fields |= {"host_private_bytes": 1_000_000_000 + draw.randrange(1 << 26), "batch_elements": 4096}
    known = {"loss": draw.gauss(2, 0.1), "lr": 1e-3, "grad_norm": 1.5, "local_grad_norm": draw.gauss(2, 0.1)}
    return encode(
        Row(rank=rank, step=step, flags=int(Flag.CHECKED), syncs=step + 1, micro_batches=1, **fields, **known)
    )


class World:
    """All ranks, in one thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.groups: dict[int, set[Circle]] = defaultdict(set)
        self.connections = 0
        for rank in range(size):
            own = circles(range(size), rank)
            self.connections = max(self.connections, sum(len(circle.members) - 1 for circle in own))
            for circle in own:
                self.groups[circle.level].add(circle)

    def tick(self, partials: list[Partial], spent: dict[str, float], came: list[int]) -> Partial:
        """Return what all ranks hear; add the times of each role and the bytes that came in."""
        here = dict(enumerate(partials))
        for level in sorted(self.groups):
            for circle in self.groups[level]:
                role = "leads neighbours" if level == 0 else "leads all" if circle.members[0] == 0 else "leads a group"
                sent = [packed(here.pop(rank)) for rank in circle.members[1:]]
                begun = time.thread_time()
                own = here[circle.members[0]]
                for data in sent:
                    own.merge(unpacked(data))
                packed(own)
                spent[role] = max(spent.get(role, 0.0), time.thread_time() - begun)
                came[circle.members[0]] += sum(map(len, sent))
        data = packed(here[0])
        for rank in range(1, self.size):
            came[rank] += len(data)
        begun = time.thread_time()
        found = unpacked(data)
        spent["hears"] = time.thread_time() - begun
        return found


def measure(size: int, steps: int) -> dict[str, Any]:
    """Return what a world of this size costs."""
    draw, world = random.Random(size), World(size)  # noqa: S311 - no secret
    parts, schedule = PartAssembler(), Schedule(budget=0.01, every_step=False)
    diagnosis = Diagnosis(world=size, config={"world": size})
    times: dict[str, list[float]] = defaultdict(list)
    came = [0] * size
    everyone = (1 << size) - 1
    for number in range(0, steps, 4):
        partials = []
        for rank in range(size):
            own = Partial(progress=number + 4, least=number + 4)
            for step in range(64 + number, 64 + number + 4):
                own.add_row(row(rank, step, draw))
            partials.append(own)
        spent: dict[str, float] = {}
        heard = world.tick(partials, spent, came)
        for role, seconds in spent.items():
            times[role].append(seconds / 4)
        begun = time.thread_time()
        for key, part in heard.steps.items():
            parts.add(key, part)
        chosen = [(key, part, chosen_step(key, part)) for key, part in parts.ready(everyone)]
        for _, _, step in chosen:
            schedule.learn(step, step.step + 1)
        times["follows"].append((time.thread_time() - begun) / 4)
        begun = time.thread_time()
        for _, _, step in chosen:
            diagnosis.feed(step)
        diagnosis.tick()
        times["judges"].append((time.thread_time() - begun) / 4)
    return {
        "times": {role: 1e3 * min(values) for role, values in times.items()},
        "bytes": {"most": max(came) / steps, "median": sorted(came)[size // 2] / steps},
        "connections": world.connections,
        "levels": len(world.groups),
    }


def kept(size: int, tensors: int = 288) -> float:
    """Return how many MiB the judge keeps of the ranks' announcements of a model's structure and values."""
    names = [f"layers.{number // 12}.block.{number % 12}.weight" for number in range(tensors)]
    values: dict[str, Callable[[], Any]] = {
        "structure:0": lambda: {"digest": "00", "parameters": [[name, [64, 64], "float32"] for name in names]},
        "group:0": lambda: {"ranks": list(range(size))},
    }
    tracemalloc.start()
    diagnosis = Diagnosis(world=size, config={"world": size})
    for topic, make in values.items():
        announcement = read_announcement(topic, make())
        for rank in range(size):
            diagnosis.tell(topic, rank, announcement)
    diagnosis.tick()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / (1 << 20)


class Counting:
    """Counts a store's operations, those of all ranks."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls, self._lock = store, Counter[str](), threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
                return getattr(self._store, name)(*args)

        return call


def meet(size: int) -> Counter[str]:
    """Return how often the ranks of a world do what with the store to meet."""
    store = Counting(HashStore())
    threading.stack_size(256 << 10)
    identity = {"versions": "1", "settings": {"a": 1}, "~run": {"directory": "runs/a", "run_id": "a"}}
    rolls = [RollCall(store, 0, rank, size, identity, lambda: None) for rank in range(size)]
    ranks = [threading.Thread(target=roll.meet) for roll in rolls]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return store.calls


def operation_seconds() -> dict[str, float]:
    """Return what each operation on a TCPStore takes where nobody else asks, there and back."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    keys, value = [f"key/{number}" for number in range(256)], "x" * 300
    store.multi_set(keys, [value] * len(keys))
    calls: dict[str, Callable[[], Any]] = {
        "set": lambda: store.set("own", value),
        "get": lambda: store.get("own"),
        "add": lambda: store.add("count", 1),
        "check": lambda: store.check(["own"]),
        "multi_get": lambda: store.multi_get(keys),
        "multi_set": lambda: store.multi_set(keys, [value] * len(keys)),
    }
    found = {}
    for name, call in calls.items():
        rounds = []
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(100):
                call()
            rounds.append((time.perf_counter() - begun) / 100)
        found[name] = min(rounds)
    return found


def talk(size: int, steps: int = 200) -> dict[str, dict[str, float]]:
    """Return what a step costs ranks that are processes on gloo, flat and over the tree: the median one and the first.

    The rows of all, which the tree asks for now and then, are not in it.
    """
    found = {}
    context = multiprocessing.get_context("fork")
    for name, how in {"flat": _talk_flat, "tree": _talk_over_a_tree}.items():
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = context.Pipe(duplex=False)
            arguments = [(how, f"{folder}/store", rank, size, steps, theirs) for rank in range(size)]
            ranks = [context.Process(target=_talk, args=each) for each in arguments]
            for rank in ranks:
                rank.start()
            spent: dict[int, tuple[float, float, float]] = dict(ours.recv() for _ in ranks)
            for rank in ranks:
                rank.join()
        median, came, connecting = (statistics.median(column) for column in zip(*spent.values(), strict=True))
        found[name] = {"median": median, "first": spent[0][0], "bytes": came, "connecting": connecting}
    return found


def _talk(how: Callable[..., Any], path: str, rank: int, size: int, steps: int, pipe: Connection) -> None:
    store = FileStore(path, size)
    draw = random.Random(rank)  # noqa: S311 - no secret
    rows = [row(rank, step, draw) for step in range(64, 64 + steps)]
    came: list[int] = []
    schedule, diagnosis = Schedule(budget=0.01, every_step=False), Diagnosis(world=size, config={"world": size})
    begun = time.monotonic()
    take = how(store, rank, size, schedule, diagnosis, came)
    connected, before = time.monotonic() - begun, time.process_time()
    for data in rows:
        take(data)
    spent = time.process_time() - before
    pipe.send((rank, (1e3 * spent / steps, sum(came) / steps, connected)))
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.05)
    os._exit(0)


def _talk_flat(
    store: FileStore, rank: int, size: int, schedule: Schedule, diagnosis: Diagnosis, came: list[int]
) -> Callable[[bytes], None]:
    group = GlooGroup(store, "flat", rank, size, _TIMEOUT)
    assembler, head = Assembler(size), bytes(_HEADER_BYTES)

    def take(data: bytes) -> None:
        gathered = group.gather((head + data).ljust(len(head) + BATCH_ROWS * ROW_BYTES, b"\0"))
        came.append(sum(map(len, gathered)))
        for other, given in enumerate(gathered):
            read = decode(given[len(head) : len(head) + ROW_BYTES])
            if fault_of(read, other, read.step) is None:
                assembler.add(other, read)
        for step in assembler.ready():
            schedule.learn(step, step.step + 1)
            diagnosis.feed(step)
        diagnosis.tick()

    return take


def _talk_over_a_tree(
    store: FileStore, rank: int, size: int, schedule: Schedule, diagnosis: Diagnosis, came: list[int]
) -> Callable[[bytes], None]:
    def connect(circle: Circle) -> GlooGroup:
        name = f"tree/{circle.level}/{circle.members[0]}"
        return GlooGroup(store, name, circle.members.index(rank), len(circle.members), _TIMEOUT)

    tree, parts, everyone = Tree(range(size), rank, connect, NoWords()), PartAssembler(), (1 << size) - 1

    def take(data: bytes) -> None:
        before, own = tree.bytes, Partial()
        own.add_row(data)
        heard, _ = tree.merge(own)
        came.append(tree.bytes - before)
        for key, part in heard.steps.items():
            if fault_of_part(key, part, size, key[1]) is None:
                parts.add(key, part)
        for key, part in parts.ready(everyone):
            step = chosen_step(key, part)
            schedule.learn(step, step.step + 1)
            if rank == 0:
                diagnosis.feed(step)
        if rank == 0:
            diagnosis.tick()

    return take


def as_of(row: Row, rank: int, **fields: Any) -> bytes:
    """Return a healthy rank's row like another rank's: equal but for what each has of its own."""
    own = {name: hash((name, rank, getattr(row, name))) & ((1 << 63) - 1) for name in _OF_ONE if getattr(row, name)}
    return encode(row._replace(rank=rank, **own, **fields))


class Others:
    """All other ranks of the one that trains, as it hears them; in a process of its own."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self._draw = random.Random(size)  # noqa: S311 - no secret
        self._wanted: list[tuple[int, int, bool]] = []
        self._asked: list[dict[str, Any]] = []
        self._groups = circles(range(size), rank)
        self._row = Row()

    def hears(self, data: bytes) -> list[bytes]:
        """Return what comes of the others in a tick: what each group gives to its first rank, or what all hear."""
        own = unpacked(data)
        for part in own.steps.values():
            self._row = decode(next(iter(part.rows().values())))
        led = [circle for circle in self._groups if circle.members[0] == self.rank]
        everyone = range(self.size)
        parts = [self._part(own, [rank for rank in everyone if rank != self.rank])] if not led else []
        for place, circle in enumerate(led):
            # of the levels below, all that the members of this one lead
            first = 0 if place == 0 else led[place - 1].members[-1]
            above = led[place + 1].members[1] if place + 1 < len(led) else self.size
            parts.append(self._part(own, list(range(first + 1, above))))
            del circle
        said = list(map(_message, own.messages))
        self._wanted = [tuple(message["key"]) for message in said if message.get("kind") == "rows"]
        self._asked = [message for message in said if message.get("kind") == "ask"]
        if not led:
            parts[0].merge(own)
        return [packed(part) for part in parts]

    def _part(self, own: Partial, ranks: list[int]) -> Partial:
        found = Partial(progress=own.progress, least=own.least, most=own.most)
        mask = sum(1 << rank for rank in ranks)
        for key, part in own.steps.items():
            row = decode(next(iter(part.rows().values())))
            mine = StepPart()
            mine.add(as_of(row, ranks[0]), mask)
            for rank in self._draw.sample(ranks, min(6, len(ranks))):
                mine.look(as_of(row, rank, step_seconds=row.step_seconds * self._draw.uniform(0.98, 1.02)))
            found.steps[key] = mine
        for optimizer, step, _ in self._wanted:
            for rank in ranks:
                data = as_of(self._row, rank, step=step, optimizer=optimizer)
                found.reports.append(report(rank, kind="row", row=base64.b64encode(data).decode()))
        for message in self._asked:
            found.reports += [no_detail(rank, message) for rank in message["ranks"] if mask >> rank & 1]
        return found


def report(rank: int, **message: Any) -> Message:
    """Return what a rank says to the one that judges."""
    return 1 << rank, zlib.compress(json.dumps(message).encode(), 1)


def no_detail(rank: int, asked: dict[str, Any]) -> Message:
    """Return the answer of a rank that cannot tell what it is asked."""
    place = {name: asked[name] for name in ("optimizer", "step", "last")}
    return report(rank, kind="detail", **place, detail=asked["kind_of"], value=None)


def _message(said: tuple[int, bytes]) -> dict[str, Any]:
    return dict(json.loads(zlib.decompress(said[1])))


def serve(pipe: Connection, size: int, rank: int) -> None:
    """Be all others."""
    others = Others(size, rank)
    with suppress(EOFError):  # the one that trains has ended
        while True:
            pipe.send(others.hears(pipe.recv_bytes()))


class Room:
    """The groups of the rank that trains: what others say in them comes from one process."""

    def __init__(self, pipe: Connection, rank: int) -> None:
        self._pipe, self._rank, self._answers = pipe, rank, list[bytes]()

    def member(self, circle: Circle) -> Member:
        """Return a group."""
        return Member(self, leads=circle.members[0] == self._rank, lowest=circle.level == 0)

    def answer(self, data: bytes, *, first: bool) -> bytes:
        """Return what comes in a group."""
        if first:
            self._pipe.send_bytes(data)
            self._answers = self._pipe.recv()
        return self._answers.pop(0)


class Member:
    """One group of the rank that trains."""

    def __init__(self, room: Room, *, leads: bool, lowest: bool) -> None:
        self._room, self._leads, self._lowest, self._told = room, leads, lowest, b""

    def collect(self, data: bytes) -> list[bytes] | None:
        """Return what the others give, where this rank leads."""
        found = self._room.answer(data, first=self._lowest)
        if self._leads:
            return [data, found]
        self._told = found
        return None

    def spread(self, data: bytes | None) -> bytes:
        """Return what the first one gives."""
        return self._told if data is None else data

    def close(self) -> None:
        """Do nothing."""


class BelievingMonitor(Monitor):
    """A monitor that takes its process for a rank of many."""

    room: Room
    believed = (0, 1)

    def _begin(self, *, alone: bool = False) -> None:
        rank, size = self.believed
        with mock.patch.multiple(dist, get_rank=lambda: rank, get_world_size=lambda: size):
            super()._begin(alone=alone)

    def _connect(self, generation: int, members: tuple[int, ...]) -> Group | Tree:
        self.schedule.follow(budget=self.config.budget, every_step=False)
        return Echo(members) if self._many is None else Tree(members, self.rank, self.room.member, NoWords())

    def words(self) -> str:
        """Say how it went."""
        known, many = self._exchange, self._many
        assert known is not None
        about = f"{known.state} {known.reason}, {known.ticks} ticks, {known.gathered_bytes} bytes came"
        left_out, every = 0 if many is None else many.left_out, self.schedule.interval(1 << 30)
        return f"  rank {self.rank} of {self.world}: {about}, {left_out} steps not judged, every {every}th checked"


#: What is sought, by what one rank shows in a step: flags, other fields, and the flags of all ranks then.
_FAULTS: dict[str, tuple[Flag, dict[str, Any], Flag, str]] = {
    "a parameter that differs": (Flag(0), {"params_after_digest": 77}, Flag(0), "RANK101"),
    "a NaN in its gradients": (Flag.LOCAL_GRADS_NONFINITE, {}, Flag.GRADS_NONFINITE, "NUM303"),
}
#: There and back between two ranks, in a network of a few hops.
_HOP_SECONDS = 0.0002


class Sighting:
    """A fault on one rank, and how long until the line is in findings.jsonl: the clock of the steps is made up.

    A tick begins when the last rank comes to it: ranks idle, unless one was busy as the last tick began, or they
    foresee a question. It takes what each role took in this thread, one after the other, and a hop up and down on each
    level. Real are what ranks say, how it is joined, the rank that judges and one other, and the file. Ranks have no
    details of the step.
    """

    def __init__(self, world: World, fault: str, draw: random.Random, folder: Path) -> None:
        self._world, self._draw, self._folder = world, draw, folder
        self._flags, self._fields, self._of_all, self._code = _FAULTS[fault]
        self._rank, self._at = draw.randrange(world.size), 204 + draw.randrange(4)
        self._now = 0.0
        self._diagnosis = Diagnosis(world=world.size, config={"world": world.size})
        self._reporter = Reporter(self._write, utc)
        self._sink = RunDirectory(folder, 0)
        self._sink.write(
            RunStarted(run_id="x", rank=0, world=world.size, directory=folder, config={}, versions={}, time=utc())
        )
        self._said: list[dict[str, Any]] = []
        self._judge = self._member(0, self._said.append)
        self._other = self._member(9, lambda _: None)
        self._judge.limit(0.01)

    def _write(self, record: Any) -> None:
        self._sink.write(record)

    def _member(self, rank: int, say: Callable[[dict[str, Any]], object]) -> ManyRanks:
        diagnosis, judges = self._diagnosis, rank == 0
        calls = Calls(
            say=lambda kind, **fields: say({"kind": kind, **fields}),
            learn=lambda _: None,
            judge=lambda step: self._judge.ask(diagnosis.feed(step)),
            show=lambda _: None,
            report=lambda found: self._reporter.report(found) if judges else None,
            adopt=lambda _: None,
            curious=diagnosis.curious,
            answer=lambda _: None,
            tell=print,
        )
        return ManyRanks(rank, self._world.size, calls, clock=lambda: self._now)

    def seconds(self, pace: float) -> float:
        """Return how long it took after the end of the faulty step, at so many seconds a step."""
        first, taken = 200, 200  # steps that ranks have taken, and said
        begins, end = 0.0, -self._draw.random() * IDLE_SECONDS
        hurried = busy = False
        reports: list[Message] = []
        while not (self._folder / FINDINGS).stat().st_size:
            full = (taken + BATCH_ROWS - first) * pace  # when so many rows wait
            self._now = end + 0.005 if hurried else max(end, min(end + IDLE_SECONDS, full))
            newest = first + int((self._now - begins) / pace)
            partials = [Partial(progress=newest, least=newest, most=newest) for _ in range(self._world.size)]
            for step in range(taken, newest):
                for rank, own in enumerate(partials):
                    own.add_row(self._row(rank, step))
            taken = newest
            partials[0].messages = [(1, zlib.compress(json.dumps(said).encode(), 1)) for said in self._said]
            self._said.clear()
            for mask, data in reports:
                partials[(mask & -mask).bit_length() - 1].reports.append((mask, data))
            spent: dict[str, float] = {}
            heard = self._world.tick(partials, spent, [0] * self._world.size)
            levels = len(self._world.groups)
            middle = max(0, levels - 2) * spent.get("leads a group", 0.0)
            end = self._now + middle + sum(spent[role] for role in ("leads neighbours", "leads all", "hears"))
            self._now = end = end + 2 * levels * _HOP_SECONDS
            begun = time.thread_time()
            reports, was_busy = self._hear(heard), busy
            busy = self._judge.busy or self._diagnosis.busy or self._other.busy
            hurried = was_busy or self._other.busy
            end += time.thread_time() - begun
        return end - (self._at + 1 - first) * pace

    def _row(self, rank: int, step: int) -> bytes:
        data = row(rank, step, self._draw)
        if step < self._at:
            return data
        of_one = rank == self._rank
        known = decode(data)
        flags = Flag(known.flags) | self._of_all | (self._flags if of_one else Flag(0))
        return encode(known._replace(flags=int(flags), **(self._fields if of_one else {})))

    def _hear(self, heard: Partial) -> list[Message]:
        """Let the ranks take a tick; return what is reported in the next."""
        everyone, answers = tuple(range(self._world.size)), list[Message]()
        for mask, data in heard.reports:
            self._take(ranks_in_mask(mask), json.loads(zlib.decompress(data)))
        for mask, data in heard.messages:
            message = json.loads(zlib.decompress(data))
            self._take(ranks_in_mask(mask), message)
            if message["kind"] == "rows":
                answers += [report(rank, kind="row", row=self._text(rank, message["key"])) for rank in everyone]
            elif message["kind"] == "ask":
                answers += [no_detail(rank, message) for rank in message["ranks"]]
        tick = Tick((), (), everyone, heard.progress, 0, heard.steps)
        for member in (self._other, self._judge):
            member.take(tick)
            member.work(last_states=False)
        self._judge.found(self._diagnosis.tick())
        self._judge.ask(self._diagnosis.requests())
        return answers

    def _take(self, ranks: tuple[int, ...], message: dict[str, Any]) -> None:
        if message["kind"] == "detail":
            for rank in ranks:
                self._diagnosis.answer(rank, message["optimizer"], message["step"], message["detail"], None)
        else:
            self._judge.hear(ranks, message["kind"], message)

    def _text(self, rank: int, key: list[Any]) -> str:
        return base64.b64encode(self._row(rank, int(key[1]))).decode()


def ranks_in_mask(mask: int) -> tuple[int, ...]:
    """Return the ranks of a set of bits, ascending."""
    return tuple(sorted(set_of(mask)))


def sight(size: int, tries: int, pace: float = 0.3) -> None:
    """Print how long it takes until a fault of one rank is found."""
    world, draw = World(size), random.Random(size)  # noqa: S311 - no secret
    for fault, (*_, code) in _FAULTS.items():
        found = []
        for _ in range(tries):
            with tempfile.TemporaryDirectory() as folder:
                found.append(Sighting(world, fault, draw, Path(folder) / "run").seconds(pace))
        ordered = sorted(found)
        most = ordered[math.ceil(0.9 * len(ordered)) - 1]
        about = (
            f"{statistics.median(found):.2f} s in the median, {most:.2f} s in nine of ten, {ordered[-1]:.2f} s at most"
        )
        print(f"  {code}, {fault}: {about} of {tries}", flush=True)


class NoWords:
    """Nobody goes."""

    def leave_word(self, text: str) -> None:
        """Forget it."""

    def word(self) -> None:
        """Return nothing."""


class Echo(NoWords):
    """The side group of few ranks, of which each says what this one does."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self._members = members

    def gather(self, data: bytes) -> list[bytes]:
        """Return what all say: the rows have the rank in them, everything else is the same."""
        if not data.startswith(struct.pack("<I", LAYOUT_VERSION)):
            return [data for _ in self._members]  # messages
        head = len(data) % ROW_BYTES
        rows = [data[at : at + ROW_BYTES] for at in range(head, len(data), ROW_BYTES)]
        return [
            data[:head] + b"".join(as_of(decode(row), rank) if rank and any(row) else row for row in rows)
            for rank in self._members
        ]

    def close(self) -> None:
        """Do nothing."""


def train(pipe: Connection, size: int, rank: int, steps: int) -> None:
    """Train in steps that are asked for, plain where the world is of one rank; never returns."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if size > 1:
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=serve, args=(theirs, size, rank), daemon=True).start()
        out = Path(tempfile.mkdtemp()) / "run"
        monitor = BelievingMonitor(Config(out=out, metrics="off", quiet=True))
        monitor.room, monitor.believed = Room(ours, rank), (rank, size)
        monitor.install()
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(12)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(512, 512)
    while pipe.recv():
        spent = []
        for _ in range(steps):
            begun, used = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            spent.append((time.perf_counter() - begun, time.process_time() - used))
        pipe.send(spent)
    if size > 1:
        print(monitor.words())
    os._exit(0)  # the others do not leave


#: What is measured against a plain process: its world and its rank.
_KINDS = {"plain": (1, 0), "plain again": (1, 0), "one of two": (2, 0)}
#: Rounds in which all is looked at, as in the beginning of each job.
_EARLY_ROUNDS = 5


def believe(size: int, rounds: int = 13, steps: int = 16) -> None:
    """Print what a step takes of a process that is a rank of many against a plain one.

    Args:
        steps: of a round; one of so many is checked in full.
    """
    multiprocessing.set_start_method("spawn", force=True)
    kinds = {**_KINDS, f"judges {size}": (size, 0), f"one of {size}": (size, 9)}
    processes = {}
    for name, (world, rank) in kinds.items():
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=train, args=(theirs, world, rank, steps)).start()
        processes[name] = ours
    taken: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name, pipe in processes.items():
            pipe.send(True)
            spent = [statistics.fmean(column) for column in zip(*pipe.recv(), strict=True)]
            if number >= _EARLY_ROUNDS:
                taken[name].append(spent)
    plain = taken.pop("plain")
    step = statistics.median(used for _, used in plain)
    print(f"\n{rounds - _EARLY_ROUNDS} rounds of {steps} steps of {step * 1e3:.0f} ms of processor time")
    for name, spent in taken.items():
        words = []
        for clock, place in (("time", 0), ("processor time", 1)):
            ratios = [own[place] / other[place] for own, other in zip(spent, plain, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            words.append(f"{clock} x{middle:.3f} [{low:.3f}, {high:.3f}]")
        print(f"  {name:<14} {', '.join(words)}", flush=True)
    for pipe in processes.values():
        pipe.send(False)


def main() -> None:
    """Print a table for each world."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", default="64,1024,8192")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--meeting", action="store_true", help="count what the store is asked")
    parser.add_argument("--talk", action="store_true", help="the ranks are processes on gloo, flat and over the tree")
    parser.add_argument(
        "--finding", type=int, default=0, help="tries of how long a fault of one rank takes to be found"
    )
    parser.add_argument("--process", type=int, default=0, help="ranks of which one real process is one")
    arguments = parser.parse_args()
    if arguments.process:
        believe(arguments.process)
        return
    for size in map(int, arguments.worlds.split(",")):
        if arguments.talk:
            for name, costs in talk(size).items():
                times = (
                    f"{costs['median']:.2f} ms of processor time a step in the median, {costs['first']:.2f} the first"
                )
                rest = f"{costs['bytes']:.0f} bytes come, {costs['connecting']:.1f} s to connect"
                print(f"{size} ranks, {name}: {times}, {rest}")
            continue
        if arguments.finding:
            print(f"\na fault of one rank of {size}, at a step each 0.3 s")
            sight(size, arguments.finding)
            continue
        result = measure(size, arguments.steps)
        print(f"\n{size} ranks, {result['levels']} levels, at most {result['connections']} connections")
        for role, milliseconds in result["times"].items():
            print(f"  {role:<18} {milliseconds:8.3f} ms of processor time a step")
        bytes_ = result["bytes"]
        print(f"  bytes into a rank  {bytes_['median']:8.0f} a step in the median, {bytes_['most']:.0f} at most")
        if arguments.meeting:
            calls, each = meet(size), operation_seconds()
            seconds = sum(number * each[name] for name, number in calls.items())
            print(f"  a meeting          {calls.total():8} operations, {seconds:.2f} s: {dict(calls)}")
        print(f"  kept of announcements {kept(size):8.1f} MiB on the rank that judges")


if __name__ == "__main__":
    main()
