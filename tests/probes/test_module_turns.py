"""Which modules of a model of many a check looks at, and which gradients are seen in a step that is not checked."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpdebug
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor.sampling import Schedule
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.module_outputs import ForwardProbe
from ddpdebug.probes.module_turns import MAX_LOOKS, Turns
from ddpdebug.probes.nonfinite_notes import Looks


class Part(nn.Module):
    """Counts its calls, and makes NaN when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return x * self.weight * (math.nan if self.bad else 1.0)


def model_of(blocks: int, parts: int) -> nn.Sequential:
    """Return blocks of parts in a row."""
    return nn.Sequential(*(nn.Sequential(*(Part() for _ in range(parts))) for _ in range(blocks)))


@pytest.fixture
def guard() -> Iterator[Guard]:
    """Return a guard under which no probe may fail, and take away what was placed under it."""
    troubles: list[str] = []
    guard = Guard(lambda part, text: troubles.append(f"{part}: {text}"))
    yield guard
    entries_of(guard).close()
    assert troubles == []


# --- turns ------------------------------------------------------------------------------------------------------------


def test_every_module_has_its_turn() -> None:
    """All modules are looked at before long, and never more at once than the bound."""
    model = model_of(100, 20)
    turns, seen = Turns(model), set[int]()
    for check in range(14):
        now = turns.now(1 << check)
        assert len(now) <= MAX_LOOKS
        seen |= {id(module) for module in now}
    assert seen == {id(module) for module in model.modules()}


def test_a_step_has_one_turn_however_many_forwards_it_has() -> None:
    """Ranks that take other numbers of micro-batches look at the same modules in the next step all the same."""
    model = model_of(100, 20)
    one, other = Turns(model), Turns(model)
    for step in (0, 0, 1, 1, 1):
        one.now(step)
    for step in (0, 1, 1):
        other.now(step)
    assert [id(m) for m in one.now(2)] == [id(m) for m in other.now(2)]


def test_few_modules_take_no_turns() -> None:
    """A model of ordinary size is looked at whole."""
    assert not Turns(model_of(10, 20)).needed


def look_at(probe: ForwardProbe, model: nn.Module, step: int) -> Looks:
    """Run a forward of which the probe looks at the modules whose turn it is."""
    looks, turns = Looks(), probe.turns(model)
    probe.begin(looks, step, modules=None if turns is None else turns.now(step))
    model(torch.ones(2, requires_grad=True))
    probe.end(model, "")
    return looks


def test_a_block_shows_what_a_module_inside_makes_and_the_next_look_finds_it(guard: Guard) -> None:
    """NaN of a module that is not looked at is seen at its block; the next check looks inside of that."""
    model, probe = model_of(50, 20), ForwardProbe(guard)
    turns = probe.turns(model)
    assert turns is not None
    now = {id(module) for module in turns.now(0)}
    block, part = next((b, p) for b in range(50) for p in range(20) if id(model[b][p]) not in now)  # type: ignore[index]
    model[block][part].bad = True  # type: ignore[index]
    first = look_at(probe, model, 0).forward[0]
    assert (first.module, first.input_nonfinite) == (str(block), False)
    modules = [call.module for call in look_at(probe, model, 1).forward]
    assert modules[0] == f"{block}.{part}"


def test_whoever_wants_all_looks_at_all(guard: Guard) -> None:
    """With every step checked each module is looked at in each."""
    model, probe = model_of(50, 20), ForwardProbe(guard, looks_at_all=lambda: True)
    model[49][19].bad = True  # type: ignore[index]
    assert look_at(probe, model, 0).forward[0].module == "49.19"


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    """Make a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("watched", [range(5), {0, 3}])
def test_few_gradients_are_hooked_where_a_step_is_not_checked(
    watched: Container[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between checks 16 hooks stand for all, those of the first and the last gradient among them; checks have all."""
    monkeypatch.setattr(Schedule, "due", lambda _self, _optimizer, step: step in {0, 3})
    monkeypatch.setattr(Schedule, "watched", lambda _self, _optimizer, step: step in watched)
    model = nn.parallel.DistributedDataParallel(model_of(10, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked: list[list[int]] = []
    with ddpdebug.watch(model, optimizer, out=tmp_path / "run", metrics="off", quiet=True):
        for _ in range(5):
            model(torch.ones(2)).sum().backward()
            hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
            hooked.append([i for i, own in enumerate(hooks) if own])
            optimizer.step()
            optimizer.zero_grad()
    assert [len(own) for own in hooked] == [200, 16, 16, 200, 16]
    assert {0, 199} <= set(hooked[1])
    del model, optimizer


_CALLS = """
import cProfile, json, sys
from collections import Counter
from pathlib import Path
from types import CodeType
import torch, torch.distributed as dist
from torch import nn
import ddpdebug
from ddpdebug.monitor.sampling import Schedule

Schedule.due = lambda _self, _optimizer, step: not step
Schedule.watched = lambda *_: True
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
home = str(Path(ddpdebug.__file__).parent)

def calls_of(blocks):
    block = [nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))) for _ in range(blocks)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*block))
    optimizer, counts = torch.optim.SGD(model.parameters(), lr=1e-4), []  # with more of it losses become NaN
    with ddpdebug.watch(model, optimizer, out=f"{sys.argv[1]}/{blocks}", metrics="off", quiet=True):
        for _ in range(40):
            with cProfile.Profile() as profile:
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            codes = {entry.code: entry.callcount for entry in profile.getstats() if isinstance(entry.code, CodeType)}
            own = {code: number for code, number in codes.items() if code.co_filename.startswith(home)}
            counts.append(Counter({f"{code.co_filename}:{code.co_name}": number for code, number in own.items()}))
    return min(counts[6:], key=Counter.total)  # what is looked at once is over; something comes only now and then

torch.manual_seed(0)
calls_of(2)  # what is done once in a process
small, large = calls_of(10), calls_of(20)
print(json.dumps([small.total(), large.total(), (large - small).most_common(20)]))
"""


@pytest.mark.smoke
def test_a_step_that_is_not_checked_does_nothing_for_each_module(tmp_path: Path) -> None:
    """Twice the modules and parameters are no reason to call more; alone, as tests leave things around functions."""
    done = subprocess.run([sys.executable, "-c", _CALLS, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    small, large, more = json.loads(done.stdout.splitlines()[-1])
    assert small
    assert large - small < 100, more  # of 200 modules more


@pytest.mark.usefixtures("group")
def test_a_parameter_that_is_put_in_between_checks_is_known_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step that is not checked does not notice of an optimizer's parameters the next check does."""
    monkeypatch.setattr(Schedule, "due", lambda _self, _optimizer, step: step in {0, 3})
    model = model_of(10, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    new = nn.Parameter(torch.ones(()))
    with ddpdebug.watch(model, optimizer, out=tmp_path / "run", metrics="off", quiet=True) as monitor:
        for step in range(4):
            model(torch.ones(2)).sum().backward()
            if step == 2:
                optimizer.param_groups[0]["params"][1] = new
            optimizer.step()
            optimizer.zero_grad()
        watch = monitor.probes.state.watches[0]
        assert any(p is new for p in watch.params)
