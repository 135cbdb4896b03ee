"""A snapshot file is read as plain data and explained in words."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.commands import main
from ddpdebug.errors import UsageError
from ddpdebug.forensics.memory.snapshot import by_line, read, report

MIB = 1 << 20


def block(size: int, state: str = "active_allocated", line: int = 0) -> dict[str, Any]:
    frames = [
        {"filename": "??", "line": 0, "name": "at::empty"},
        {"filename": "/opt/lib/python3.11/site-packages/torch/nn/functional.py", "line": 3, "name": "linear"},
        {"filename": "/home/me/train.py", "line": line, "name": "train"},
    ]
    return {"size": size, "state": state, "frames": frames if line else []}


def snapshot(*blocks: dict[str, Any], oom: int = 0) -> dict[str, Any]:
    total = sum(b["size"] for b in blocks)
    used = sum(b["size"] for b in blocks if b["state"].startswith("active"))
    segment = {"total_size": total, "allocated_size": used, "blocks": list(blocks)}
    events = [{"action": "oom", "size": oom, "device_free": 5 * MIB, "frames": block(1, line=88)["frames"]}]
    return {"segments": [segment], "device_traces": [events if oom else []]}


def test_fragmented() -> None:
    """Enough is free, in pieces that are too small."""
    holes = [block(30 * MIB, "inactive"), block(40 * MIB, line=31), block(30 * MIB, "inactive"), block(9 * MIB, line=7)]
    text = "\n".join(report(snapshot(*holes, oom=50 * MIB)))
    assert "free between living blocks: 60 MiB in 2 pieces, the largest 30 MiB" in text
    assert "an allocation of 50 MiB failed with 5 MiB free on the device" in text
    assert "asked for at /home/me/train.py:88" in text
    assert "fragmentation: enough is free" in text
    assert "expandable_segments:True" in text


def test_full() -> None:
    """Lines of the user's in the order of what they hold."""
    full = snapshot(block(10 * MIB, line=5), block(70 * MIB, line=31), block(10 * MIB, line=5))
    assert by_line(full) == {"/home/me/train.py:31": 70 * MIB, "/home/me/train.py:5": 20 * MIB}
    assert "not fragmented" in "\n".join(report(full))
    assert "no stacks" in "\n".join(report(snapshot(block(MIB))))


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps([1]), pickle.dumps({"segments": 3})])
def test_no_snapshot(tmp_path: Path, content: bytes) -> None:
    """Anything else is refused with what to give instead."""
    file = tmp_path / "x.pickle"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="no memory snapshot"):
        read(file)


class Trap:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_nothing_in_the_file_runs(tmp_path: Path) -> None:
    """A pickle that calls a function is refused before it does."""
    file, made = tmp_path / "x.pickle", tmp_path / "made"
    file.write_bytes(pickle.dumps({"segments": [Trap(made)]}))
    with pytest.raises(UsageError, match="plain data only"):
        read(file)
    assert not made.exists()


@pytest.mark.parametrize(
    "value", [{"segments": [1, {"blocks": 3}, {"blocks": [None, {"size": "x"}]}]}, {"segments": []}]
)
def test_malformed_entries_are_passed_over(value: dict[str, Any]) -> None:
    """A damaged file gives a page, not an error."""
    assert report(value)[0].startswith("reserved 0 bytes")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the page, and a wrong file is wrong usage."""
    file = tmp_path / "x.pickle"
    file.write_bytes(pickle.dumps(snapshot(block(70 * MIB, line=31))))
    assert main(["memory", str(file)]) == 0
    assert "70 MiB  /home/me/train.py:31" in capsys.readouterr().out
    assert main(["memory", str(tmp_path / "none.pickle")]) == 2
    assert "cannot read" in capsys.readouterr().err
