"""The process in which the rules judge: the same findings, however often it dies, and where there can be none."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.exchange.ticks import Tick
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor import companion as companion_of
from ddpdebug.monitor.companion import Companion, Reply
from ddpdebug.monitor.judging import Judging, Outlets
from ddpdebug.monitor.sampling import Schedule
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.announcements import Failure
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.row import Flag, Row, encode
from ddpdebug.schema.step import Step
from ddpdebug.sinks import Saved, StepJudged

sys.path.append(str(Path(__file__).parent.parent / "support"))
from machine import until
from run_records import started

#: Steps in which rank 1 has parted, from one that is neither the first nor the last.
_STEPS, _PARTED = 40, 17


def _row(rank: int, step: int) -> Row:
    digest = 1 + step + 100 * (rank == 1 and step >= _PARTED)
    return Row(
        rank=rank, step=step, flags=int(Flag.CHECKED), params_before_digest=digest, params_after_digest=digest + 1
    )


def _step(step: int, world: int = 3) -> Step:
    return Step(step=step, optimizer=0, world=world, rows={rank: _row(rank, step) for rank in range(world)})


class _Rank:
    """The rank that leads, with a companion and a run directory."""

    def __init__(self, directory: Path, *, logs: bool = True) -> None:
        self.found: list[tuple[str, int | None, bool]] = []
        self.findings: list[Finding] = []
        self.troubles: list[str] = []
        self._sink = RunDirectory(directory, 0)
        self._sink.write(started(directory))
        self.companion = Companion(
            {"world": 3, "config": {"world": 3}},
            lambda: directory if logs else None,
            lambda: self.findings,
            lambda part, message: self.troubles.append(f"{part}: {message}"),
        )

    def take(self, step: int) -> None:
        """Judge a step, as a tick does."""
        whole = _step(step)
        self.companion.feed(whole)
        self._sink.write(StepJudged(step=whole))
        self.settle(self.companion.tick())

    def settle(self, reply: Reply) -> None:
        """Answer what the ranks are asked, and keep what was found."""
        for finding, new in reply.found:
            self.found.append((finding.code, finding.step, new))
            self.findings = [*(known for known in self.findings if known.id != finding.id), finding]
        for asked in reply.asks:
            for rank in asked.ranks:
                about = {"optimizer": asked.optimizer, "step": asked.step, "last": asked.last, "detail": asked.kind}
                self._sink.write(Saved(kind="detail", payload={"rank": rank, **about, "value": None}))
                self.companion.answer(rank, asked.optimizer, asked.step, asked.kind, None, asked.last)

    def wait(self) -> None:
        """Take ticks until nothing is on its way."""

        def tick() -> bool:
            self.settle(self.companion.tick())
            return not (self.companion.busy or self.companion._calls)

        assert until(tick)

    def end(self) -> list[tuple[str, int | None]]:
        """Return the code and step of what was found newly."""
        self.wait()
        self.settle(self.companion.finish())
        self.companion.close()
        return [(code, step) for code, step, new in self.found if new]


def _process(rank: _Rank) -> int:
    """Return the id of the companion's process, by the socket that it holds."""
    way: Any = rank.companion._way
    inode = str(Path(f"/proc/self/fd/{way._socket.fileno()}").readlink())
    own = {os.getpid(), os.getppid()}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) not in own:
            command = (folder / "cmdline").read_bytes() if (folder / "cmdline").exists() else b""
            if b"ddpdebug.companion.process" in command and _peers(folder, inode):
                return int(folder.name)
    raise AssertionError("there is no companion")


def _peers(folder: Path, inode: str) -> bool:
    """Return whether a process has the other end of a pair of sockets: the number after or before."""
    number = int(inode.partition("[")[2].rstrip("]"))
    ends = {f"socket:[{number + 1}]", f"socket:[{number - 1}]"}
    try:
        return any(str(file.readlink()) in ends for file in (folder / "fd").iterdir())
    except OSError:
        return False


@pytest.fixture
def expected(tmp_path: Path) -> list[tuple[str, int | None]]:
    """What the rules find in this process."""
    rank = _Rank(tmp_path / "here")
    rank.companion.here = True
    for step in range(_STEPS):
        rank.take(step)
    found = rank.end()
    assert ("RANK101", _PARTED) in found
    return found


def _run(rank: _Rank, each: Callable[[int], object] = lambda _: None) -> list[tuple[str, int | None]]:
    for step in range(_STEPS):
        rank.take(step)
        rank.wait()
        each(step)
    return rank.end()


def test_it_finds_what_the_rules_find_here(tmp_path: Path, expected: list[tuple[str, int | None]]) -> None:
    """In a process of its own, which is nobody's child and ends with the connection."""
    rank, seen = _Rank(tmp_path / "run"), list[int]()
    assert _run(rank, lambda step: step == 1 and seen.append(_process(rank))) == expected
    assert rank.troubles == []
    assert until(lambda: not Path(f"/proc/{seen[0]}").exists())


@pytest.mark.parametrize("logs", [True, False])
def test_no_finding_is_lost_where_it_is_killed(
    tmp_path: Path, expected: list[tuple[str, int | None]], logs: bool
) -> None:
    """The next one reads the run directory; without one it goes on from what was found."""
    rank, generator = _Rank(tmp_path / "run", logs=logs), random.Random(3)
    at = set(generator.sample(range(_STEPS), 4))
    found = _run(rank, lambda step: step in at and os.kill(_process(rank), signal.SIGKILL))
    assert found == expected if logs else ("RANK101", _PARTED) in found
    assert rank.troubles  # one line may be of two that were killed before the first was missed


def test_one_that_is_stopped_is_left(tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits for it for some seconds only, and the rules judge in this process."""
    monkeypatch.setattr(companion_of, "_AT_THE_END", 0.2)
    rank, stopped = _Rank(tmp_path / "run"), list[int]()

    def stop(step: int) -> None:
        if step == _STEPS - 1:
            stopped.append(_process(rank))
            os.kill(stopped[0], signal.SIGSTOP)

    try:
        assert _run(rank, stop) == expected
    finally:
        os.kill(stopped[0], signal.SIGCONT)


def test_the_rules_judge_here_where_no_process_can_be_started(
    tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that is said once."""

    def refuse(*_: object) -> None:
        raise OSError("the process for it did not start")

    monkeypatch.setattr("ddpdebug.processes.detached.start", refuse)
    rank = _Rank(tmp_path / "run")
    assert _run(rank) == expected
    assert len(rank.troubles) == 1


def test_a_script_that_closes_its_descriptors_ends_nothing(tmp_path: Path, expected: Any) -> None:
    """What has the number of the connection then is the script's, and nothing is written into it."""
    rank, mine = _Rank(tmp_path / "run"), list[int]()

    def close(step: int) -> None:
        if step == 3:
            number = rank.companion._way._socket.fileno()  # type: ignore[union-attr]
            own = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)
            os.dup2(own, number)
            mine.extend((own, number))

    assert _run(rank, close) == expected
    assert (tmp_path / "mine").read_bytes() == b""
    for number in mine:
        os.close(number)  # still open


# --- who judges -------------------------------------------------------------------------------------------------------


class _Member:
    """What one of three ranks says, as it hears what all have sent.

    Args:
        log: the run directory that the first rank has left, if it can be read.
    """

    def __init__(self, rank: int, log: Path | None = None) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.reported: list[str] = []
        self.again = 0
        self.spoken: list[int] = []
        self.asked: list[Any] = []
        guard = Guard(lambda *_: None)
        outlets = Outlets(
            say=lambda kind, **fields: self.said.append((kind, fields)),
            write=lambda _: None,
            learn=lambda *_: None,
            report=lambda found, _: self.reported.extend(finding.code for finding, _ in found),
            known=list,
            log=lambda: log,
            announce_again=self._announce_again,
            speak=lambda: self.spoken.append(rank),
            trouble=lambda *_: None,
        )
        self.judging = Judging(rank, 3, {"world": 3}, guard, Schedule(budget=0.01, every_step=False), self, outlets)  # type: ignore[arg-type]
        self.judging._companion.here = True

    def _announce_again(self) -> None:
        self.again += 1

    def ask(self, requests: Sequence[Any]) -> None:
        """Take questions, in the place of what answers them."""
        self.asked += requests

    def now(self, request: Any) -> None:
        """Answer a question of the end."""
        self.asked.append(request)

    def tick(self, members: tuple[int, ...], *steps: int) -> None:
        """Take a tick that brings steps."""
        rows = tuple((rank, encode(_row(rank, step))) for step in steps for rank in members)
        self.judging.progress = 1 << 20
        self.judging.take(Tick(rows, (), members, 1 << 20))
        self.judging.conclude()


@pytest.fixture
def members() -> Iterator[list[_Member]]:
    ranks = [_Member(rank) for rank in range(3)]
    yield ranks
    for rank in ranks:
        rank.judging.close()


def test_the_first_rank_judges_and_says_to_all_what_was_found(members: list[_Member]) -> None:
    """All of them report it as they hear it, the first too."""
    for rank in members:
        rank.tick((0, 1, 2), *range(_PARTED + 1))
    assert [bool(rank.said) for rank in members] == [True, False, False]
    asked = [fields for kind, fields in members[0].said if kind == "ask"]
    assert asked
    assert all(fields["ranks"] == [0, 1, 2] for fields in asked)
    for fields in asked:
        for rank in range(3):
            about = {"optimizer": fields["optimizer"], "step": fields["step"], "detail": fields["kind_of"]}
            members[0].judging.hear_detail((rank,), {**about, "value": None})
    for rank in members:
        rank.tick((0, 1, 2))
    assert members[0].reported == []
    said = [message for message in members[0].said if message[0] == "findings"]
    for rank in members:
        for kind, fields in said:
            rank.judging.hear_judge((0,), kind, fields)
    assert members[0].reported == members[1].reported == members[2].reported
    assert "RANK101" in members[0].reported


def test_what_is_asked_at_the_end_is_answered_by_the_rank_that_judges(members: list[_Member]) -> None:
    """A companion that starts slowly asks when the others have gone."""
    first = members[0]
    rows = tuple((rank, encode(_row(rank, step))) for step in range(_PARTED + 1) for rank in range(3))
    first.judging.progress = 1 << 20
    first.judging.take(Tick(rows, (), (0, 1, 2), 1 << 20))  # and no tick follows
    first.judging.rest(lost=False)
    assert {asked.kind for asked in first.asked} >= {"parameters"}
    assert "RANK101" in first.reported


def test_who_follows_judges_when_the_ranks_before_it_have_left(members: list[_Member]) -> None:
    """And nobody else does; all say to it again what they had announced."""
    _, second, third = members
    for rank in (second, third):
        rank.tick((0, 1, 2), 0)
        rank.tick((1, 2), *range(1, _PARTED + 1))
    assert (second.judging.judges, third.judging.judges) == (True, False)
    assert (second.again, third.again) == (1, 1)
    assert any(kind == "ask" for kind, _ in second.said)
    assert third.said == []


def test_a_rank_that_goes_on_alone_has_no_companion_until_it_steps(members: list[_Member]) -> None:
    """At the end of a process group each of them is alone for a moment."""
    second = members[1]
    second.tick((0, 1, 2), 0)
    second.tick((1,))
    second.judging.rest(lost=False)
    assert second.judging._companion._way is None
    second.tick((1,), 1)
    assert second.judging._companion._way is not None


@pytest.mark.parametrize("readable", [True, False])
def test_a_failure_is_judged_by_what_the_rank_before_has_heard(tmp_path: Path, readable: bool) -> None:
    """Its loader had ended in the step that this rank fails in; without its records nothing is judged any more."""
    sink = RunDirectory(tmp_path, 0)
    sink.write(started(tmp_path))
    stream = {"loader": 0, "iterations": 1, "batches": 3, "began": 0, "step": 3}
    loader = {"batch_size": 4, "iterations": 1, "dataset": None, "workers": 0, "batches": None, "step": 0}
    told = [(rank, "loader:0", loader) for rank in range(3)] + [
        (0, "alone:stream", stream),
        (2, "alone:stream", stream),
    ]
    for rank, topic, value in told:
        sink.write(Saved(kind="fact", payload={"rank": rank, "topic": topic, "value": value}))
    sink.close()
    member = _Member(1, tmp_path if readable else None)
    member.tick((0, 1, 2), 0)
    member.tick((1,))
    reason = "exception: RuntimeError: Connection closed by peer [127.0.0.1]:4321"
    failure = Failure(reason=reason, step=2, raised_in=3, phase="backward")
    member.judging.hear_announcement(1, Failure.topic, failure)
    member.judging.rest(lost=False)
    member.judging.close()
    assert member.reported == (["DATA905"] if readable else [])
    assert member.spoken == ([1] if readable else [])


def test_steps_are_followed_at_once_by_a_tick(members: list[_Member]) -> None:
    """The rank that judges may ask about them; without it the others would idle for a second before they hear that."""
    for rank in members:
        rank.tick((0, 1, 2), 0)
        assert rank.judging.busy or rank is members[0]
        rank.tick((0, 1, 2))
        assert not rank.judging.busy
