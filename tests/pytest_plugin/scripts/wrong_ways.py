"""Tests that go wrong in every way; after each, one that is right."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def gone(look):
    """Wait until nothing is seen any more: what was killed needs its turn to end."""
    until = time.monotonic() + 50
    while look() and time.monotonic() < until:
        time.sleep(0.02)
    return not look()


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def sum_of_ranks(rank):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


@pytest.mark.ranks(2)
def test_raises(rank):
    print(f"printed by {rank}")
    if rank == 1:
        expected = [0, 1, 3]
        assert [0, 1, rank + 1] == expected
    sum_of_ranks(rank)


@pytest.mark.ranks(2)
def test_after_raises(rank):
    assert sum_of_ranks(rank) == 1


@pytest.mark.ranks(2, timeout=6)
def test_hangs(rank):
    if rank == 1:
        time.sleep(1000)  # the culprit
    sum_of_ranks(rank)


@pytest.mark.ranks(2)
def test_after_hangs(rank):
    assert sum_of_ranks(rank) == 1


@pytest.mark.ranks(2)
def test_leaves(rank):
    if rank == 0:
        os._exit(0)
    sum_of_ranks(rank)


@pytest.mark.ranks(2)
def test_after_leaves(rank):
    assert sum_of_ranks(rank) == 1


@pytest.mark.ranks(2)
def test_leaves_with_7(rank):
    if rank == 1:
        os._exit(7)


@pytest.mark.ranks(2)
def test_after_leaves_with_7(rank):
    assert sum_of_ranks(rank) == 1


@pytest.mark.ranks(2)
def test_killed(rank):
    if rank == 1:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    sum_of_ranks(rank)


@pytest.mark.ranks(2)
def test_after_killed(rank):
    assert sum_of_ranks(rank) == 1


@pytest.mark.ranks(2)
def test_prints_a_lot(rank):
    for _ in range(1000):
        print("x" * 50_000)
    print(f"end of {rank}")
    assert rank == 0


@pytest.mark.ranks(2)
def test_after_prints_a_lot(rank):
    assert sum_of_ranks(rank) == 1


@pytest.mark.ranks(2)
def test_leaves_a_grandchild(rank):
    code = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", code, "grandchild-of-a-test"])
    assert child.wait() == 0


@pytest.mark.ranks(2)
def test_after_leaves_a_grandchild(rank):
    session = os.environ["RANKS_TEST_SESSION"].encode()
    mine = [path.parent for path in Path("/proc").glob("[0-9]*/environ") if session in read(path)]
    assert len(mine) >= 2  # this process, and the one that made it
    assert gone(lambda: [path for path in mine if b"grandchild-of-a-test" in read(path / "cmdline")])


@pytest.mark.ranks(2)
def test_ignores_sigterm_and_hangs(rank):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 0:
        raise ValueError("the cause")
    while True:
        time.sleep(1)


def test_ranks_are_killed_between_tests():
    session = os.environ["RANKS_TEST_SESSION"].encode()

    def ranks():
        """All of the session but this process and its child, which makes the ranks."""
        found = [path.parent for path in Path("/proc").glob("[0-9]*/environ") if session in read(path)]
        parents = {int(path.name): int(read(path / "stat").rpartition(b")")[2].split()[1]) for path in found}
        return [pid for pid, parent in parents.items() if os.getpid() not in (pid, parent)]

    for pid in ranks():
        os.kill(pid, signal.SIGKILL)
    assert gone(ranks)


@pytest.mark.ranks(2)
def test_after_ranks_are_killed_between_tests(rank):
    assert sum_of_ranks(rank) == 1


@pytest.mark.ranks(2)
def test_changes_the_surroundings(rank):
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.manual_seed(1234)


@pytest.mark.ranks(2)
def test_after_changes_the_surroundings(rank):
    assert "LEFT_BEHIND" not in os.environ
    assert os.getcwd() != "/"
    assert torch.initial_seed() != 1234


@pytest.mark.ranks(2)
def test_forks(rank):
    pid = os.fork()
    if pid == 0:
        raise RuntimeError("only the child")
    os.waitpid(pid, 0)


@pytest.fixture
def slow_to_end():
    yield
    dist.barrier()  # one rank never comes


@pytest.mark.ranks(2)
def test_teardown_waits(rank, slow_to_end):
    assert rank == 0


@pytest.mark.ranks(2, timeout=6)
def test_waits_on_both(rank):
    dist.recv(torch.ones(1), 1 - rank)


@pytest.mark.ranks(2)
def test_skips_on_one(rank):
    if rank == 1:
        pytest.skip("no data here")


@pytest.mark.ranks(2)
def test_last(rank):
    assert sum_of_ranks(rank) == 1
