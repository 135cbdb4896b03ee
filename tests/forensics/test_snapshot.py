"""A snapshot of the allocator by the lines that allocated."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdebug.forensics.memory.snapshot import by_line

MIB = 1 << 20


def block(size: int, state: str = "active_allocated", line: int = 0) -> dict[str, Any]:
    frames = [
        {"filename": "??", "line": 0, "name": "at::empty"},
        {"filename": "/opt/lib/python3.11/site-packages/torch/nn/functional.py", "line": 3, "name": "linear"},
        {"filename": "/home/me/train.py", "line": line, "name": "train"},
    ]
    return {"size": size, "state": state, "frames": frames if line else []}


def snapshot(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"segments": [{"blocks": list(blocks)}]}


def test_full() -> None:
    """Lines of the user's in the order of what they hold."""
    full = snapshot(block(10 * MIB, line=5), block(70 * MIB, line=31), block(10 * MIB, line=5))
    assert by_line(full) == {"/home/me/train.py:31": 70 * MIB, "/home/me/train.py:5": 20 * MIB}


@pytest.mark.parametrize(
    "value", [{"segments": [1, {"blocks": 3}, {"blocks": [None, {"size": "x"}]}]}, {"segments": []}]
)
def test_malformed_entries_are_passed_over(value: dict[str, Any]) -> None:
    """A damaged snapshot is no error."""
    assert by_line(value) == {}
