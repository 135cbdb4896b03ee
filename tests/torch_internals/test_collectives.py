"""Torch's record of collectives: counts and entries of real ranks, and what is made of one that is not known."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from machine import free_port

from ddpdebug.torch_internals import collectives, names
from ddpdebug.torch_internals.collectives import Collectives, members_of_groups

_SCRIPT = """
import json, sys, threading, time
import torch, torch.distributed as dist
from ddpdebug.torch_internals.collectives import Collectives, members_of_groups

dist.init_process_group("gloo")
rank, told = dist.get_rank(), {}
pair = dist.new_group([0, 1])
record = Collectives()
told["nothing"] = record.counts()
dist.all_reduce(torch.ones(2, 3))
dist.broadcast(torch.ones(4, dtype=torch.float64), 0, group=pair)
dist.all_gather_object([None, None], "x")
told["counts"] = record.counts()
told["newest"] = [[e.group, e.number, e.operation, e.shapes, e.is_done, e.point_to_point] for e in record.newest()]
told["members"] = members_of_groups()
for _ in range(3):
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
told["after messages"] = record.counts()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
    thread.start()
    while record.newest(1)[0].number == told["counts"]["0"][0]:  # what is counted gets its entry later
        time.sleep(0.01)
    told["waiting"] = record.counts(exact=True)["0"]
    told["pending"] = [[e.operation, e.is_done] for e in record.newest()][-1]
    store.set("seen", "1")
    thread.join()
else:
    store.wait(["seen"])
    dist.all_reduce(torch.ones(1))
told["inexact"] = record.counts()["0"]
told["done"] = record.counts(exact=True)["0"]
for _ in range(50):
    dist.all_reduce(torch.ones(1))
told["many"] = [len(record.newest()), len(record.newest(5)), record.newest(1)[0].number == record.counts()["0"][0]]
dist.barrier()
dist.destroy_process_group()
told["destroyed"] = members_of_groups()
print(json.dumps(told), flush=True)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run two ranks."""
    if any(name.path.endswith("_dump_fr_trace") for name in names.missing(doctor=True)):
        pytest.skip("this torch keeps no record of collectives on gloo")
    script = tmp_path_factory.mktemp("record") / "script.py"
    script.write_text(_SCRIPT)
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
               "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "2000"}  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, script], env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]  # gloo may have written a line of its own


@pytest.mark.smoke
@pytest.mark.jobs
def test_real_ranks(told: list[dict[str, Any]]) -> None:
    """All ranks count alike, by the names of groups."""
    first, second = told
    assert first["members"] == second["members"]
    assert sorted(first["members"].values()) == [[0, 1], [0, 1]]
    assert first["destroyed"] == {}
    assert set(first["counts"]) == set(first["members"])
    # what has completed is not compared: operations may end out of order, and torch tells of the one that ended last
    entered = {name: counts[0] for name, counts in first["counts"].items()}
    assert entered == {name: counts[0] for name, counts in second["counts"].items()}
    assert entered["0"] >= 3
    assert {name: counts[0] for name, counts in first["after messages"].items()} == entered
    (pair,) = set(first["members"]) - {"0"}
    by_operation = {operation: rest for _, _, operation, *rest in first["newest"]}
    assert by_operation["all_reduce"] == [["float32 [2, 3]"], True, False]
    assert by_operation["broadcast"] == [["float64 [4]"], True, False]
    assert [group for group, _, operation, *_ in first["newest"] if operation == "broadcast"] == [pair]
    numbers = [number for group, number, *_ in first["newest"] if group == "0"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers[-1] == entered["0"]


@pytest.mark.jobs
def test_one_that_is_pending(told: list[dict[str, Any]]) -> None:
    """It is entered and not completed, until the other rank has come."""
    first, second = told
    entered, completed = first["waiting"]
    assert entered == first["counts"]["0"][0] + 1
    assert completed < entered
    assert first["pending"] == ["all_reduce", False]
    assert first["done"][0] == second["done"][0] == entered  # without the messages, which torch counts as well
    assert second["inexact"][0] >= entered
    assert first["many"] == [32, 5, True]


@pytest.mark.parametrize(
    "dump", [b"", b"x", pickle.dumps([1]), pickle.dumps({}), pickle.dumps({"entries": None, "pg_status": None})]
)
def test_a_record_that_is_not_known(dump: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told, and nothing raised, where there is no process group either."""
    monkeypatch.setattr(collectives.names, "dump_flight_recorder", lambda **_: dump)
    assert Collectives().counts() is None
    assert Collectives().newest() == []
    assert members_of_groups() == {}


def test_a_name_that_another_group_has_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the groups were destroyed and made anew, only what the newest of a name has done counts."""

    def entry(group: int, number: int) -> dict[str, Any]:
        return {"process_group": ("0", "default_pg"), "pg_id": group, "op_id": number, "collective_seq_id": number,
                "is_p2p": False, "profiling_name": "gloo:all_reduce", "retired": group == 2}  # fmt: skip

    status = {"last_started_collective": -1, "last_enqueued_collective": 9, "last_completed_collective": 8}
    known = {
        "pg_status": {"1": status, "2": {**status, "last_enqueued_collective": 3, "last_completed_collective": 3}},
        "entries": [entry(1, 9), entry(2, 3)],
    }
    monkeypatch.setattr(collectives.names, "dump_flight_recorder", lambda **_: pickle.dumps(known))
    record = Collectives()
    assert record.counts() == {"0": (3, 3)}
    assert [(one.number, one.is_done) for one in record.newest()] == [(3, True)]


def test_no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may have been built without it."""

    def absent(**_: bool) -> bytes:
        raise NotImplementedError

    monkeypatch.setattr(collectives.names, "dump_flight_recorder", absent)
    assert (Collectives().counts(), Collectives().newest()) == (None, [])


def test_groups_that_this_rank_is_not_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch notes them under a number; they have no name here, and no members that count."""
    world = SimpleNamespace(pg_group_ranks={-100: {0: 0, 2: 1}})
    monkeypatch.setattr(names, "group_world", world)
    monkeypatch.setattr(collectives.dist, "is_initialized", lambda: True)
    assert members_of_groups() == {}
