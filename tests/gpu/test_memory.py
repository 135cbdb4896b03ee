"""What ddpdebug says of memory: of a device's, and on the CPU of the host's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ddpdebug.commands import main


@pytest.mark.jobs
def test_an_allocation_that_fails_is_explained(
    device: str, train: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """MEM401 names module and line, the error is torch's; on CUDA there is a snapshot, which names the line as well."""
    options = ["--every-step", "--memory-history", "full"] if device == "cuda" else ["--memory-limit", "400000000"]
    done = train("out_of_memory.py", device, watched=True, options=options)
    assert done.status == 1
    assert "OutOfMemoryError" in done.text
    (found,) = [found for found in done.findings() if found.code == "MEM401"]
    assert (found.step, list(found.subject), found.phase) == (4, ["Greedy"], "forward")
    assert str(found.location).endswith("out_of_memory.py:20")
    folder = done.directory / "ranks" / "0" / "memory"
    told = json.loads((folder / "step-4.json").read_text())
    assert told["requested"] == 64 << 20
    assert told["allocated"] > 128 << 20
    assert told["device"]  # the limit on the CPU stands for one
    assert told["lines"]
    if device == "cuda":
        assert main(["memory", str(folder / "step-4-snapshot.pickle")]) == 0
        assert "out_of_memory.py:20" in capsys.readouterr().out
    assert done.trouble() == ""


@pytest.mark.jobs
def test_growth_is_found(device: str, train: Callable[..., Any]) -> None:
    """MEM402 on a device, MEM406 on the host, each with the list that holds the tensors."""
    done = train("allocator.py", "leak", device, watched=True, options=[])
    assert done.status == 0, done.text
    code = "MEM402" if device == "cuda" else "MEM406"
    (found,) = [found for found in done.findings() if found.code == code]
    assert "`held` (list" in json.dumps(found.evidence, ensure_ascii=False)
    assert done.trouble() == ""


@pytest.mark.jobs
def test_a_rank_that_uses_much_more_is_found(device: str, train: Callable[..., Any]) -> None:
    """MEM405 names it, with both peaks."""
    done = train("allocator.py", "imbalance", device, watched=True, ranks=2, options=[])
    assert done.status == 0, done.text
    (found,) = [found for found in done.findings() if found.code == "MEM405"]
    assert (list(found.ranks), list(found.subject)) == ([1], ["device" if device == "cuda" else "host"])
    assert done.trouble() == ""


@pytest.mark.gpu
@pytest.mark.jobs
def test_fragmentation_is_found(train: Callable[..., Any]) -> None:
    """MEM404: of 400 pieces one in ten stays; what comes next fits into none of the holes and empties the cache."""
    done = train("allocator.py", "fragments", "cuda", watched=True, options=[])
    assert done.status == 0, done.text
    assert "MEM404" in [found.code for found in done.findings()]
    assert done.trouble() == ""
