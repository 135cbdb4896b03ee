"""What `make compat` compares and writes; it runs gigabytes of other torches, which nothing here does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.torch_internals import names
from tools import compat

_ROOT = Path(__file__).resolve().parent.parent.parent


def _runs(**findings: list[list[Any]]) -> dict[str, Any]:
    return {name: {"findings": found, "problems": []} for name, found in findings.items()}


def _row(torch: str, runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    row = {"torch": torch, "python": "3.11.7", "date": "2026-11-24", "commit": "0123456789", "missing": {}}
    return {**row, "passed": 10, "skipped": 1, "failed": [], "runs": runs, **more}


@pytest.mark.parametrize("index, value", [(0, "RANK102"), (1, 26), (2, [1]), (3, ["other.weight"]), (4, "train.py:8")])
def test_findings_are_the_same_in_all_that_is_compared(index: int, value: Any) -> None:
    """Code, step, ranks, subject, location: a finding that differs in one of them is another one."""
    finding = ["RANK101", 25, [2], ["fc.weight"], "train.py:7"]
    other = [*finding[:index], value, *finding[index + 1 :]]
    assert compat.differences(_runs(flip=[finding]), _runs(flip=[list(finding)])) == []
    here, not_here = compat.differences(_runs(flip=[finding]), _runs(flip=[other]))
    assert here.endswith("only here")
    assert not_here == "flip: RANK101 step 25 ranks [2] fc.weight train.py:7 not here"


def test_the_order_of_findings_is_no_difference_and_a_run_that_lacks_is() -> None:
    """Findings of one step may come in any order; what was not run was not the same."""
    one, two = ["A", 1, [], [], None], ["B", 1, [], [], None]
    assert compat.differences(_runs(x=[one, two]), _runs(x=[two, one])) == []
    assert compat.differences(_runs(x=[], y=[]), _runs(x=[])) == ["y: not run on this one"]
    assert compat.differences(_runs(x=[]), _runs(x=[], y=[])) == ["y: not run on the other"]


def test_locations_are_those_of_any_clone() -> None:
    """And a rank that has ended its script is nowhere: that it stands in what starts the ranks is chance."""
    places = [f"{_ROOT}/tests/support/zygote.py:76", f"{_ROOT}/tests/corpus/train.py:7", "train.py:7", None]
    placed = compat.placed(_runs(x=[["A", 1, [], [], place] for place in places]))
    assert placed == _runs(
        x=[["A", 1, [], [], place] for place in (None, "tests/corpus/train.py:7", "train.py:7", None)]
    )


def test_the_page_shows_each_row_and_what_is_not_as_on_the_reference() -> None:
    """By torch, 2.6 before 2.13; with failed tests, wrong runs, other findings and what is missing."""
    wrong = _runs(flip=[])
    wrong["flip"]["problems"] = ["missed: expected RANK101"]
    rows = [
        _row("2.13.0+cpu", _runs(flip=[["RANK101", 25, [2], ["fc.weight"], None]])),
        _row("2.6.0+cu124", wrong, failed=["tests.test_x.test_y"], missing={"torch._new": "tests are off"}),
    ]
    text = compat.page(rows)
    assert re.findall(r"^\| (2\S+) .*?\| (\d of \d) \| (\S+) \|", text, re.MULTILINE) == [
        ("2.6.0+cu124", "0 of 1", "1"),
        ("2.13.0+cpu", "1 of 1", "-"),
    ]
    for said in (
        "tests.test_x.test_y",
        "flip: missed: expected RANK101",
        "fc.weight not here",
        "torch._new: tests are",
    ):
        assert said in text
    assert "## torch 2.13.0+cpu, Python 3.11.7\n\nNothing failed, nothing differs, nothing is missing.\n" in text


def test_the_page_counts_the_private_names_by_what_they_are_for() -> None:
    """In one table; the names themselves are printed by `ddpdebug doctor --verbose`."""
    text = compat.page([]).partition("## Private names of torch\n")[2]
    known = [name for name in names.TABLE if not name.path.startswith("autograd node ")]
    for feature in {name.feature.name for name in known}:
        assert f"| {feature} | {sum(name.feature.name == feature for name in known)} |" in text


def test_the_record_has_a_line_for_each_run() -> None:
    """And holds what was put in."""
    rows = {
        "3.11 2.8.0": _row("2.8.0", _runs(y=[], x=[["A", 1, [], [], None]])),
        "3.11 2.13.0": _row("2.13.0", _runs(x=[])),
    }
    text = compat.written(rows)
    assert json.loads(text) == rows
    assert len(text.splitlines()) == 2 + 3 + 2 * 2


def test_tests_are_counted_by_what_became_of_them() -> None:
    """A failure and an error have a name; a skip is no pass."""
    cases = '<testcase classname="t" name="ok"/><testcase classname="t" name="s"><skipped/></testcase>'
    cases += (
        '<testcase classname="t" name="f"><failure/></testcase><testcase classname="t" name="e"><error/></testcase>'
    )
    assert compat.tests_of(f"<testsuites><testsuite>{cases}</testsuite></testsuites>") == {
        "passed": 1,
        "skipped": 1,
        "failed": ["t.f", "t.e"],
    }


def test_each_script_of_the_slice_is_there_once() -> None:
    """A script that is renamed must not leave the slice unseen, nor bring another one in."""
    scripts = [path.name for path in (_ROOT / "tests" / "corpus").glob("*.py")]
    for prefix in (*compat.FAULTS, *compat.HEALTHY):
        assert sum(name.startswith(prefix) for name in scripts) == 1, prefix


def test_the_bounds_are_those_of_the_project() -> None:
    """The oldest is what pyproject.toml asks for, the reference what is installed for the tests."""
    assert f'"torch>={compat.TORCHES[0].removesuffix(".0")}"' in (_ROOT / "pyproject.toml").read_text()
    assert f"\ntorch=={compat.REFERENCE}\n" in (_ROOT / "constraints.txt").read_text()


def test_the_page_is_made_of_what_is_recorded() -> None:
    """Nobody has written into docs/compatibility.md by hand."""
    rows = json.loads((_ROOT / "tools" / "compat.json").read_text())
    assert (_ROOT / "docs" / "compatibility.md").read_text() == compat.page(rows.values())
