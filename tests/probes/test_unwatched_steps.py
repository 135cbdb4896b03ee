"""Steps that are not watched: they are counted, they have no row, and what is out of the usual wakes them."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpdebug.exchange.step_vote import NumericGuard
from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import end_numbers
from ddpdebug.probes.loop_calls import Losses, StepCalls
from ddpdebug.probes.nonfinite_notes import Judgement
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.training_events import Event, StepPassed, Woken
from ddpdebug.probes.training_loop.training_loop import RecipeNotes
from ddpdebug.schema.row import Flag

#: One of so many steps is watched.
EVERY = 5


@dataclass
class Job:
    """A model that trains, and what is noted of it."""

    probes: Probes
    rows: list[StepRecord] = field(default_factory=list)
    passed: list[tuple[int, int]] = field(default_factory=list)
    model: nn.Module = field(default_factory=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    calls: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.probes.entries.built.module(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, x: torch.Tensor | None = None) -> None:
        """Take a step."""
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4) if x is None else x).mean().backward()
        self.optimizer.step()

    def run(self, steps: int) -> None:
        """Take several."""
        for _ in range(steps):
            self.step()

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that have rows."""
        return [record.step for record in self.rows]

    def hear(self, kind: type[Event]) -> list[Event]:
        """Return a list in which events of a kind will be."""
        heard: list[Event] = []
        self.probes.bus.on("test", kind, heard.append)
        return heard


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job of short steps, of which each fifth is watched from step 5 on."""
    monkeypatch.setattr("ddpdebug.probes.unwatched_steps._FOLLOWED_SECONDS", math.inf)  # however busy the machine is
    rows: list[StepRecord] = []
    passed: list[tuple[int, int]] = []
    probes = Probes(
        Guard(lambda part, message: pytest.fail(f"{part}: {message}")),
        rows.append,
        lambda *_, **__: None,
        lambda optimizer, step: step % (2 * EVERY) == 0,
        watched=lambda optimizer, step: step % EVERY == 0 or step < 3,
        passed=lambda optimizer, step: passed.append((optimizer, step)),
        vote=NumericGuard("report", 3, lambda *_, **__: None, lambda *_: None),
    )
    probes.patches.install()
    yield Job(probes, rows, passed)
    probes.remove()
    probes.release()


def test_each_step_has_a_row_or_is_counted(job: Job) -> None:
    """Under the numbers that the steps have."""
    job.run(22)
    assert job.steps == [0, 1, 2, 5, 10, 15, 20]
    assert sorted([*job.steps, *(step for _, step in job.passed)]) == list(range(22))
    assert [record.step for record in job.rows if record.checked] == [0, 10, 20]


def test_what_a_step_calls_is_not_looked_at(job: Job) -> None:
    """No event of a forward, a backward or a step, in steps that are not watched."""
    job.run(6)
    seen: list[Event] = []
    heard = set(job.probes.bus._looks)
    for kind in heard:
        job.probes.bus.on("test", kind, seen.append)
    job.run(3)
    assert {type(event) for event in seen} == {StepPassed}


def test_calls_of_modules_are_left_alone(job: Job) -> None:
    """Whatever looks at them in watched steps."""
    job.run(4)
    assert job.probes.entries.unwatched
    assert job.probes.entries.calls.idle


def test_a_watched_step_is_whole(job: Job) -> None:
    """With its loss, its one micro-batch, and its own time, after steps that were not watched."""
    job.run(16)
    for record in job.rows:
        assert len(record.since.parts[Losses].given) == record.since.micro_batches == 1
        assert not record.since.cut


def test_an_evaluation_wakes_and_its_loss_is_in_the_next_row(job: Job) -> None:
    """It is the model's, whatever step comes next."""
    job.run(7)
    woken = job.hear(Woken)
    job.model.eval()
    with torch.no_grad():
        loss = nn.MSELoss()(job.model(torch.ones(2, 4)), torch.zeros(2, 1))
    job.model.train()
    assert woken
    job.run(4)
    (row,) = (record for record in job.rows if record.step == 10)
    assert [read() for read in row.since.parts[Losses].validation] == [pytest.approx(float(loss))]


def test_a_load_is_in_the_next_row(job: Job) -> None:
    """Which is a later step's."""
    job.run(7)
    job.model.load_state_dict(job.model.state_dict())
    job.run(4)
    (row,) = (record for record in job.rows if record.step == 10)
    assert row.since.parts[StepCalls].loads


def test_a_clipping_before_the_last_backward_is_not_of_what_the_step_uses(job: Job) -> None:
    """Its norm is that of other gradients."""

    def step(late: bool) -> bool:
        if late:
            nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.model(torch.ones(2, 4)).mean().backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        return job.rows[-1].since.parts[StepCalls].goes_by_one()

    assert [step(late=False), step(late=True), step(late=False)] == [True, False, True]


def test_an_exception_wakes(job: Job) -> None:
    """The step in which the script goes on has no row, and counts once."""
    job.run(7)
    woken = job.hear(Woken)
    with pytest.raises(RuntimeError):
        job.step(torch.ones(2, 3))
    assert woken
    job.run(5)
    assert job.steps == [0, 1, 2, 5, 10]
    assert job.passed[-1] == (0, 11)


def test_a_closure_is_one_step(job: Job) -> None:
    """Whatever it evaluates."""
    job.run(7)

    def closure() -> float:
        job.optimizer.zero_grad()
        loss = job.model(torch.ones(2, 4)).mean()
        loss.backward()
        with torch.no_grad():
            job.model(torch.ones(2, 4))
        return float(loss.detach())

    for _ in range(4):
        job.optimizer.step(closure)
    assert job.steps == [0, 1, 2, 5, 10]


def test_an_optimizer_that_is_new_is_looked_at(job: Job) -> None:
    """It takes the place of another one, and goes on with its numbers."""
    job.run(7)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
    job.run(10)
    numbers = sorted([*job.steps, *(step for _, step in job.passed)])
    assert len(numbers) == 17


def test_a_wrapped_optimizer_is_one_step(job: Job) -> None:
    """The outer one's."""

    class Twice(torch.optim.SGD):
        inner: torch.optim.Optimizer

        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            self.inner.step()
            super().step(closure)

    job.optimizer = outer = Twice(job.model.parameters(), lr=0.01)
    outer.inner = torch.optim.SGD(job.model.parameters(), lr=0.01)
    job.run(12)
    assert job.steps == [0, 1, 2, 5, 10]
    assert len(job.passed) == 7


def test_a_loss_that_is_not_finite_has_a_row_of_its_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are long enough to be followed by the numbers; once, for the next ones show nothing new."""
    monkeypatch.setattr("ddpdebug.probes.unwatched_steps._FOLLOWED_SECONDS", 0.0)
    job.run(7)
    job.step(torch.full((2, 4), torch.nan))
    assert job.steps[-1] == 7
    assert job.rows[-1].flags & Flag.ALONE
    assert not all(map(math.isfinite, [read() for read in job.rows[-1].since.parts[Losses].given]))
    job.run(2)
    assert job.steps[-1] == 7


def test_skips_of_a_scaler_are_skips(job: Job) -> None:
    """And steps that it lets happen are none."""
    job.run(7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for x in (1.0, torch.inf, 1.0, 1.0):
        job.optimizer.zero_grad()
        scaler.scale(job.model(torch.full((2, 4), x)).mean()).backward()
        scaler.step(job.optimizer)
        scaler.update()
    numbers = sorted([*job.steps, *(step for _, step in job.passed)])
    assert numbers == list(range(11))
    assert not job.rows[-1].flags & Flag.SKIPPED


def test_gradients_that_are_never_cleared_are_seen(job: Job) -> None:
    """Each watched step begins with what the one before it has left."""
    job.run(7)
    for _ in range(4):
        job.model(torch.ones(2, 4)).mean().backward()
        job.optimizer.step()
    assert job.rows[-1].step == 10
    assert job.rows[-1].since.parts[RecipeNotes].flags & Flag.GRADS_CARRIED


def test_a_forward_without_gradients_in_each_step_is_a_part_of_it(job: Job) -> None:
    """A teacher, a target: it wakes for a while, and then no more."""
    job.run(7)
    woken = job.hear(Woken)
    for _ in range(60):
        with torch.no_grad():
            job.model(torch.ones(2, 4))
        job.step()
    early, watched = len(woken), 12
    assert early <= 8 + watched


def test_an_optimizer_is_not_kept_alive(job: Job) -> None:
    """It may go after a step that was not watched."""
    job.run(7)
    gone = weakref.ref(job.optimizer)
    job.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    gc.collect()
    assert gone() is None


def test_reductions_that_others_have_not_counted_do_not_count(job: Job) -> None:
    """Whoever looks at the rest of a step alone has none more than the others."""
    job.run(7)
    before = job.probes.state.syncs
    with torch.no_grad():
        job.model(torch.ones(2, 4))
    job.probes.state.syncs += 1
    job.run(4)
    assert job.probes.state.syncs == before


def test_a_step_that_has_raised_is_not_waited_for(job: Job) -> None:
    """The next optimizer's steps are counted."""

    class Broken(torch.optim.SGD):
        broken = False

        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            if self.broken:
                raise MemoryError
            super().step(closure)

    job.optimizer = broken = Broken(job.model.parameters(), lr=0.01)
    job.run(7)
    broken.broken = True
    with pytest.raises(MemoryError):
        job.step()
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
    job.run(10)
    assert job.steps[-1] in {10, 15}


NAN = torch.full((2, 4), math.nan)


@pytest.mark.parametrize("bad", [17, 19])
def test_what_the_last_steps_leave_non_finite_has_a_row_at_the_end(job: Job, bad: int) -> None:
    """One, of the last step, with the names of the parameters and the first step that was not watched."""
    job.run(bad)
    job.step(NAN)
    job.run(19 - bad)
    job.probes.end_numbers.look()
    job.probes.end_numbers.look()
    assert job.steps[-2:] == [15, 19]
    record = job.rows[-1]
    assert record.flags == Flag.ALONE | Flag.PARAMS_NONFINITE
    found = record.parts[Judgement].detail.parameters
    assert found is not None
    assert found.unwatched_since == 16
    assert {"0.weight", "2.weight"} <= {*found.before}
    assert (len(found.before) == 2) == (bad == 19)  # a step later the biases are so as well


def test_an_optimizer_that_is_gone_at_the_end_was_looked_at(job: Job) -> None:
    """As it went."""
    job.run(17)
    job.step(NAN)
    del job.optimizer
    gc.collect()
    job.probes.end_numbers.look()
    assert [(record.step, bool(record.flags & Flag.PARAMS_NONFINITE)) for record in job.rows[-1:]] == [(17, True)]


@pytest.mark.parametrize("steps", [16, 19])
def test_finite_parameters_have_no_row_at_the_end(job: Job, steps: int) -> None:
    """Whether the last step was watched or not."""
    job.run(steps)
    job.probes.end_numbers.look()
    assert job.steps == [0, 1, 2, 5, 10, 15]


def test_what_was_found_before_is_not_found_again_at_the_end(job: Job) -> None:
    """By a step that was watched."""
    job.run(15)
    job.step(NAN)
    job.run(7)
    before = job.steps
    job.probes.end_numbers.look()
    assert job.steps == before


def test_what_has_failed_is_not_read_at_the_end(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that numbers were still on: those of an optimizer that ended before it."""
    read: list[int] = []
    later = SimpleNamespace(numbers=lambda numbers: lambda: read.append(len(numbers)) or [math.nan] * len(numbers))
    monkeypatch.setattr(end_numbers, "device", later)
    job.run(17)
    del job.optimizer
    gc.collect()
    monkeypatch.setattr(end_numbers, "failure", SimpleNamespace(failed=True))
    job.probes.end_numbers.look()
    assert read == []
    assert job.steps == [0, 1, 2, 5, 10, 15]
