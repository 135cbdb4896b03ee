"""A step's time is told apart into phases, collectives and waiting, with real ranks one of which sleeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.probes.step_state import Clock
from ddpdebug.run_directory.reader import read_rows
from ddpdebug.schema.row import Flag, Row

_HERE = Path(__file__).resolve().parent
#: For which the slow rank sleeps, as the script says.
SECONDS = 0.06
#: Manners in which rank 1 sleeps in backward, once or more in each step.
IN_BACKWARD = (
    "backward",
    "hooks",
    "accumulation",
    "generator",
    "discriminator",
    "static_graph",
    "unused",
    "lbfgs",
    "scaler",
    "cut",
    "fused",
)
#: What is given to the script: one of these makes both optimizers of a pair.
_MANNERS = (
    *("plain", "backward", "hooks", "forward", "other", "optimizer", "accumulation", "adversarial", "static_graph"),
    *("unused", "lbfgs", "scaler", "cut", "buffers", "fused"),
    *("reduces", "collectives", "collector"),
)

Rows = dict[str, dict[int, list[Row]]]


@pytest.fixture(scope="module")
def rows(run_jobs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The rows of a job, by manner and rank."""
    folder = tmp_path_factory.mktemp("paces")
    options = ["--out", str(folder / "run"), "--every-step", "--metrics-port", "0"]
    script = str(_HERE / "scripts" / "paces.py")
    job = {"script": script, "args": _MANNERS, "cwd": str(folder), "options": options, "patient": True}
    (result,) = run_jobs([job])
    assert [rank["status"] for rank in result] == [0, 0], [rank["err"][-2000:] for rank in result]
    names = next(line.split()[1:] for line in result[0]["out"].splitlines() if line.startswith("manners "))
    found: Rows = {name: {0: [], 1: []} for name in names}
    for row in read_rows(folder / "run"):
        found[names[row.optimizer]][row.rank].append(row)
    return found


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(600)
@pytest.mark.smoke
def test_phases_add_up(rows: Rows) -> None:
    """Backward is the rank's own part and its waiting, a step its own phases and what it waited."""
    for name, of_ranks in rows.items():
        for row in (row for of_rank in of_ranks.values() for row in of_rank):
            times = row.backward_local_seconds, row.sync_wait_seconds, row.collective_seconds, row.other_seconds
            assert min(times) >= 0, (name, row)
            assert row.backward_local_seconds + row.sync_wait_seconds == pytest.approx(row.backward_seconds), name
            assert sum(row.own_phases.values()) == pytest.approx(row.own_seconds), name
    assert [len(of_rank) for of_ranks in rows.values() for of_rank in of_ranks.values()] == [4] * 2 * len(rows)


@pytest.mark.jobs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", IN_BACKWARD)
@pytest.mark.smoke
def test_a_rank_that_is_slow_in_backward_does_not_wait(rows: Rows, name: str) -> None:
    """Its own part has the time in every step, and the other rank waits for it."""
    slow, waits = rows[name][1], rows[name][0]
    assert [row.step for row in slow if row.backward_local_seconds < SECONDS] == []
    assert max(row.sync_wait_seconds for row in waits) > SECONDS / 2
    assert min(row.backward_local_seconds for row in waits) < SECONDS / 2


@pytest.mark.jobs
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, seconds",
    [
        ("forward", lambda row: row.forward_seconds),
        ("optimizer", lambda row: row.optimizer_seconds),
        ("other", lambda row: row.other_seconds),
    ],
)
@pytest.mark.smoke
def test_other_phases_have_what_happens_in_them(rows: Rows, name: str, seconds: Callable[[Row], float]) -> None:
    """The phase in which a rank sleeps has the time."""
    assert min(seconds(row) for row in rows[name][1]) >= SECONDS


@pytest.mark.jobs
@pytest.mark.timeout(600)
@pytest.mark.smoke
def test_buffers_are_waited_for_outside_of_forward(rows: Rows) -> None:
    """Who waits for the rank that broadcasts buffers has that in its collectives, not in forward."""
    assert max(row.collective_seconds for row in rows["buffers"][1]) > SECONDS / 2
    assert min(row.forward_seconds for row in rows["buffers"][1]) < SECONDS / 2
    assert min(row.other_seconds for row in rows["buffers"][0]) >= SECONDS


@pytest.mark.jobs
@pytest.mark.timeout(600)
@pytest.mark.smoke
def test_collectives_are_in_no_phase(rows: Rows) -> None:
    """Who waits in a collective inside of forward, of backward or of none has that in its collectives alone."""
    slow, waits = rows["reduces"][1], rows["reduces"][0]
    assert min(row.forward_seconds for row in slow) >= SECONDS
    assert min(row.backward_local_seconds for row in slow) >= SECONDS
    assert max(row.collective_seconds for row in waits) > SECONDS
    assert min(row.forward_seconds + row.backward_local_seconds for row in waits) < SECONDS
    slow, waits = rows["collectives"][1], rows["collectives"][0]
    assert min(row.other_seconds for row in slow) >= SECONDS * 1.5  # also what came after an error
    assert max(row.collective_seconds for row in waits) > SECONDS
    assert min(row.other_seconds for row in waits) < SECONDS


@pytest.mark.jobs
@pytest.mark.timeout(600)
@pytest.mark.smoke
def test_the_collector_of_a_rank_is_its_own(rows: Rows) -> None:
    """A rank with a large heap that collects in each step is told from one with a small heap."""
    large, small = ([row.gc_seconds for row in rows["collector"][rank]] for rank in (1, 0))
    assert min(large) > 0.0
    assert min(large) > min(small)


@pytest.mark.jobs
@pytest.mark.timeout(600)
@pytest.mark.smoke
def test_inputs_are_added_up(rows: Rows) -> None:
    """The row has the elements of all forwards with gradients beside those of the largest."""
    found = {name: {(row.input_elements, row.batch_elements) for row in rows[name][0]} for name in rows}
    assert found["plain"] == {(64, 64)}
    assert found["accumulation"] == {(96, 64)}
    assert found["generator"] == {(128, 64)}
    assert found["cut"] == {(64, 64)}  # what an exception has cut short is not in it


@pytest.mark.jobs
@pytest.mark.timeout(600)
@pytest.mark.smoke
def test_a_skipped_step_has_times(rows: Rows) -> None:
    """A step that the scaler skips has all but the optimizer's."""
    skipped = [row for row in rows["scaler"][1] if row.has(Flag.SKIPPED)]
    assert len(skipped) == 1
    assert skipped[0].backward_local_seconds >= SECONDS


def test_the_clock_stands_still_in_the_outermost_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested ones count once, an end without a beginning does nothing, and a lost end is forgotten."""
    now = [0.0]
    monkeypatch.setattr("ddpdebug.probes.step_state.time.perf_counter", lambda: now[0])
    clock = Clock()
    clock.go_on()
    clock.stop()
    now[0] = 1.0
    clock.stop()
    assert clock.now() == 0.0
    now[0] = 3.0
    clock.go_on()
    now[0] = 4.0
    clock.go_on()
    assert (clock.away, clock.now()) == (4.0, 0.0)
    clock.stop()
    clock.reset()
    clock.go_on()
    now[0] = 5.0
    assert (clock.away, clock.now()) == (4.0, 1.0)
