"""Each thing of ours that a job calls, with a fault in it: the job ends as without us, and the part says so.

First the scripts run as they are, and what runs under the guard is written down; then each of these fails in turn, with
an ordinary error and with one whose own text cannot be had.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.jobs]

Run = Callable[[list[dict[str, Any]]], list[list[dict[str, Any]]]]

_RECORD = """
import atexit, json
from ddpdebug.isolation.guard import Guard
seen, run, contain = {}, Guard.run, Guard.contain
def key(part, probe):
    return part + " " + getattr(probe, "__qualname__", type(probe).__name__)
def noting(how):
    def noted(self, part, probe, /, *args, **kwargs):
        seen[key(part, probe)] = 1
        return how(self, part, probe, *args, **kwargs)
    return noted
Guard.run, Guard.contain = noting(run), noting(contain)
atexit.register(lambda: open(PLACE, "w").write(json.dumps(sorted(seen))))
"""

_FAULT = """
import atexit, json
from ddpdebug.isolation.guard import Guard
class Odd(RuntimeError):
    def __str__(self): raise ValueError
hits, run, contain = {}, Guard.run, Guard.contain
def failing(how):
    def faulty(self, part, probe, /, *args, **kwargs):
        key = part + " " + getattr(probe, "__qualname__", type(probe).__name__)
        def fail(*_, **__):
            hits[key] = 1
            raise Odd() if ODD else RuntimeError("injected")
        return how(self, part, fail if key in KEYS else probe, *args, **kwargs)
    return faulty
Guard.run, Guard.contain = failing(run), failing(contain)
atexit.register(lambda: open("hits.json", "w").write(json.dumps(sorted(hits))))
"""
_OPTIONS = ["--metrics", "off", "--every-step", "--out", "run"]


def _job(args: list[str], options: list[str] | None, inject: str = "") -> dict[str, Any]:
    return {"script": "every_entry.py", "args": args, "ranks": 1, "options": options, "inject": {"0": inject}}


@pytest.mark.parametrize(
    "args", [pytest.param([], id="ddp"), pytest.param(["alone"], id="alone", marks=pytest.mark.thorough)]
)
def test_every_entry_may_fail(args: list[str], run_jobs: Run, tmp_path: Path) -> None:
    """Same output (weights, gradients, state, generators) and status, with one more line on stderr."""
    place = tmp_path / "seen.json"
    plain, recorded = run_jobs([_job(args, None), _job(args, _OPTIONS, f"PLACE = {str(place)!r}\n{_RECORD}")])
    assert (plain[0]["status"], recorded[0]["status"]) == (0, 0), recorded[0]["err"] + plain[0]["err"]
    assert recorded[0]["out"] == plain[0]["out"]
    assert "switched itself off" not in recorded[0]["err"], recorded[0]["err"]
    keys: list[str] = json.loads(place.read_text())
    wanted = {"probe:optimizer", "probe:backward", "probe:clearing", "probe:schedules", "probe:scene", "probe:loader"}
    assert {key.split()[0] for key in keys} >= wanted
    for odd in (False, True):
        left, size = set(keys), 16
        while left:
            groups = _groups(sorted(left), size)
            places = [tmp_path / f"{odd}-{len(left)}-{size}-{number}" for number in range(len(groups))]
            for folder in places:
                folder.mkdir()
            jobs = [
                {**_job(args, _OPTIONS, f"KEYS, ODD = {group!r}, {odd}\n{_FAULT}"), "cwd": str(folder)}
                for group, folder in zip(groups, places, strict=True)
            ]
            before = len(left)
            for group, folder, result in zip(groups, places, run_jobs(jobs), strict=True):
                hits = json.loads((folder / "hits.json").read_text())
                about = f"{group}, {odd}: {result[0]['err'][-1500:]}"
                assert result[0]["status"] == 0, about
                assert result[0]["out"] == plain[0]["out"], about
                assert "Traceback" not in result[0]["err"], about
                _assert_said(hits, result[0]["err"], folder / "run", odd=odd)
                left -= set(hits)
            if len(left) == before:  # each hides one of its group
                assert size > 1, f"never called again: {sorted(left)}"
                size = 1 if size < 4 else size // 4


_ALL = {"DATA901", "NUM301", "RANK101", "RCP801"}
#: What is not found any more, at most, while a part is off; nothing else is.
_COSTS = {
    "probe:threads": _ALL,  # which thread trains: without it nothing is looked at
    "probe:optimizer": _ALL - {"RCP801"},  # the row itself
    "probe:forward": {"DATA901"},
    "probe:batch": {"DATA901"},
    "probe:parameters": {"RANK101"},
    "probe:numerics": {"NUM301"},
    "probe:numerics-forward": {"NUM301"},
    "probe:losses": {"RCP801"},
    "probe:labels": {"RCP801"},
}
#: What goes with a part, because it would judge half of the data.
_WITH = {
    "probe:backward": {"probe:own-times"},
    "probe:forward": {"probe:own-times"},
    "probe:recipe": {"probe:clearing"},
    "probe:losses": {"probe:labels", "probe:leaks"},
    "probe:gradients": {"probe:numerics-gradients"},
    "probe:modules": {"probe:layers"},
    "probe:numerics": {"probe:numerics-after"},
    "probe:numerics-forward": {"probe:layers"},
    "probe:state": {"probe:numerics-after"},
}


def test_a_fault_costs_only_what_depends_on_it(run_jobs: Run, tmp_path: Path) -> None:
    """Of four faults of a job all are found but those for which the look is needed that fails; none is made up."""

    def job(folder: Path, inject: str) -> dict[str, Any]:
        folder.mkdir()
        ranks = {"0": inject, "1": inject}
        job = {"script": "faulty.py", "ranks": 2, "options": _OPTIONS, "inject": ranks, "cwd": str(folder)}
        return {**job, "patient": True, "meets": 0}

    place = tmp_path / "seen.json"
    (recorded,) = run_jobs([job(tmp_path / "whole", f"PLACE = {str(place)!r}\n{_RECORD}")])
    assert [rank["status"] for rank in recorded] == [0, 0], recorded
    assert _codes(tmp_path / "whole") == _ALL
    keys = [key for key in json.loads(place.read_text()) if key.startswith("probe:")]
    assert {key.split()[0] for key in keys} >= _COSTS.keys() | _WITH.keys()
    groups = [[key] for key in keys if key.split()[0] in _COSTS]
    groups += _groups([key for key in keys if key.split()[0] not in _COSTS], 5)
    jobs = [job(tmp_path / str(i), f"KEYS, ODD = {group!r}, False\n{_FAULT}") for i, group in enumerate(groups)]
    for i, (group, result) in enumerate(zip(groups, run_jobs(jobs), strict=True)):
        parts, about = {key.split()[0] for key in group}, f"{group}: {result[0]['err'][-1500:]}"
        assert [rank["status"] for rank in result] == [0, 0], about
        said = set(re.findall(r"ddpdebug: (probe:\S+)(?: of rank \d+)? has switched itself off", result[0]["err"]))
        assert said, about
        assert said <= parts.union(*(_WITH.get(part, set()) for part in parts)), about
        cost = set().union(*(_COSTS.get(part, set()) for part in parts))
        found = _codes(tmp_path / str(i))
        assert found >= _ALL - cost, about
        assert found <= _ALL | ({"NUM302"} if "NUM301" in cost else set()), about  # the loss is NaN as well


def _codes(folder: Path) -> set[str]:
    lines = (folder / "run" / "findings.jsonl").read_text().splitlines()
    return {json.loads(line)["code"] for line in lines}


def _groups(keys: list[str], size: int) -> list[list[str]]:
    """Put keys of different parts together; of one part the first failure switches the others off."""
    groups: list[list[str]] = []
    for key in keys:
        part = key.split()[0]
        fits = (group for group in groups if len(group) < size and all(k.split()[0] != part for k in group))
        found = next(fits, None)
        if found is None:
            groups.append([key])
        else:
            found.append(key)
    return groups


def _assert_said(hits: list[str], err: str, run: Path, *, odd: bool) -> None:
    """Each part is named in the run directory, each cause on the terminal."""
    parts = {key.split()[0] for key in hits}
    if parts & {"sinks", "exchange", "exchange:say", "close:exchange", "close:sinks", "patches"}:
        return  # nobody is left to be told, or to tell
    said = [json.loads(line) for path in run.glob("ranks/*/trouble.jsonl") for line in path.read_text().splitlines()]
    cause = "Odd" if odd else "RuntimeError: injected"
    for part in {part for part in parts if not part.startswith(("close:", "patch:"))}:
        assert any(one["part"] == part and one["message"].startswith(cause) for one in said), (part, said, err)
        assert f" has switched itself off: {cause}" in err, (part, err)
