"""`ddpdebug checkpoint compare` as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ddpdebug.commands import main


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with two files that differ in one element."""
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.arange(6.0).view(2, 3), "v": torch.full((2,), float("nan"))}
    torch.save(state, "a.pt")
    state["w"][1, 2] = 1.31e5
    state["v"][1] = 1
    torch.save(state, "b.pt")


def test_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    """0 equal, 1 different, 2 for what cannot be read, with what was found on standard output."""
    assert main(["checkpoint", "compare", "a.pt", "a.pt"]) == 0
    assert capfd.readouterr().out.startswith("equal: 2 entries, 8 elements compared bit by bit\n")
    assert main(["checkpoint", "compare", "a.pt", "b.pt"]) == 1
    out, err = capfd.readouterr()
    assert "elements   w  1 of 6 elements differs, first at [1, 2]: A 5, B 1.31e+05" in out
    assert err == ""
    assert main(["checkpoint", "compare", "a.pt", "c.pt"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("ddpdebug: error: there is no checkpoint 'c.pt'; give a directory of ")
    assert err.count("\n") == 1


def test_lines_and_json(capfd: pytest.CaptureFixture[str]) -> None:
    """Fewer lines on demand; strict JSON with everything."""
    assert main(["checkpoint", "compare", "--lines", "1", "a.pt", "b.pt"]) == 1
    assert capfd.readouterr().out.endswith("  and 1 more lines\n")
    assert main(["checkpoint", "compare", "--json", "a.pt", "b.pt"]) == 1
    found = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert found["equal"] is False
    assert {one["name"]: one["values"] for one in found["differences"]} == {"w": [5.0, 1.31e5], "v": ["nan", 1.0]}
    assert found["a"]["kind"] == "torch.save"


@pytest.mark.parametrize(
    "line, words",
    [
        ("checkpoint compare a.pt", "missing argument 'b'"),
        ("checkpoint compare --line 3 a.pt b.pt", "unknown option --line; did you mean --lines?"),
        ("checkpoint compare --lines 0 a.pt b.pt", "--lines"),
        ("checkpoint look a.pt", "no such command 'look'"),
    ],
)
def test_a_wrong_line(line: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It is named, and nothing is read."""
    assert main(line.split()) == 2
    err = capfd.readouterr().err
    assert err.startswith("ddpdebug: error: ")
    assert words.lower() in err.lower()
