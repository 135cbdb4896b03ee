"""Every rule's own examples are its tests, its prose is its runbook, its file is named after it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from rule_examples import diagnose, judge

from ddpdebug.detectors.base import Detector, Examples, runbook
from ddpdebug.detectors.catalog import FAMILIES, catalog, planned
from ddpdebug.detectors.fail.texts import code_of
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.schema.finding import Finding, Severity

RULES = catalog()
#: What users filter on; a new rule joins it with the release that brings it.
PROMISED = {
    **dict.fromkeys(["RANK101", "RANK103", "RANK104", "RANK105", "RANK109"], Severity.CRITICAL),
    **dict.fromkeys(["RANK102", "RANK106", "RANK107", "RANK112", "RANK113"], Severity.ERROR),
    "RANK108": Severity.WARNING,
    "RANK111": Severity.INFO,
    **dict.fromkeys([f"SYNC20{i}" for i in (1, 2, 3, 4, 5, 8)], Severity.CRITICAL),
    "SYNC211": Severity.CRITICAL,
    "SYNC206": Severity.ERROR,
    "SYNC209": Severity.ERROR,
    "SYNC210": Severity.ERROR,
    "SYNC207": Severity.WARNING,
    "DATA901": Severity.ERROR,
    "DATA910": Severity.ERROR,
    **dict.fromkeys(["DATA902", "DATA904", "DATA906", "DATA907", "DATA908", "RANK110"], Severity.WARNING),
    **dict.fromkeys(["DATA903", "DATA905", "RCP810"], Severity.ERROR),
    **dict.fromkeys([f"RCP8{i}" for i in ("02", "03", "04", "06", "08", "11", "13", "16", "17", "19")], Severity.ERROR),
    **dict.fromkeys([f"RCP8{i}" for i in ("01", "05", "07", "09", "12", "18", "20", "21")], Severity.WARNING),
    **dict.fromkeys([f"NUM30{i}" for i in (1, 2, 3, 4, 5, 9)], Severity.CRITICAL),
    **dict.fromkeys(["NUM306", "NUM307", "NUM308"], Severity.WARNING),
    **dict.fromkeys([f"HLTH7{i:02}" for i in range(1, 17)], Severity.WARNING),
    **dict.fromkeys(["HLTH710", "HLTH713"], Severity.ERROR),
    "MEM401": Severity.CRITICAL,
    "MEM403": Severity.ERROR,
    **dict.fromkeys([f"MEM40{i}" for i in (2, 4, 5, 6)], Severity.WARNING),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_fires(rule: type[Detector]) -> None:
    """A rule fires on each of its own examples, with its own code, alone and in the diagnosis; the file keeps it."""
    for i, example in enumerate(examples := rule.fires_on):
        findings = judge(rule, example)
        assert findings, f"example {i}"
        assert {finding.code for finding in findings} == {rule.code}, f"example {i}"
        assert [finding.code for finding in diagnose(rule, example)] == [rule.code], f"example {i}"
        for finding in findings:
            again = Finding.from_json(finding.to_json())
            assert (again.code, again.step, again.ranks) == (finding.code, finding.step, finding.ranks)
    assert len(examples) >= 2


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_silent(rule: type[Detector]) -> None:
    """A rule says nothing on its counter-examples."""
    for i, example in enumerate(examples := rule.silent_on):
        assert judge(rule, example) == [], f"example {i}"
        assert diagnose(rule, example) == [], f"example {i}"
    assert len(examples) >= 2


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_watched_job_makes_no_examples(rule: type[Detector]) -> None:
    """They are thousands of steps, which every rank would make when it attaches and keep to its end."""
    for name in ("fires_on", "silent_on"):
        assert isinstance(vars(rule)[name], Examples)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_complete(rule: type[Detector]) -> None:
    """A rule has a runbook without gaps."""
    prose = runbook(rule)
    assert all(prose[part] for part in ("meaning", "impact", "diagnosis", "causes", "remedy"))
    assert len(prose["causes"]) >= (1 if rule.code.startswith("FAIL") else 3)  # torch has said what happened
    assert len(prose["remedy"]) >= (1 if rule.code.startswith("FAIL") else 2)
    assert rule.title
    assert rule.title[0].islower() or rule.title[1].isupper()
    assert not rule.title.endswith(".")
    assert all("!" not in line for line in (*prose["causes"], *prose["remedy"], prose["impact"]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_named_alike(rule: type[Detector]) -> None:
    """File, class and code are one name, in the folder of the family."""
    file = Path(inspect.getfile(rule))
    if rule.code.startswith("FAIL"):
        assert file.parent.name == "fail"  # made from one table
        return
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", rule.__name__).lower()
    assert file.stem == f"{rule.code.lower()}_{snake}"
    assert file.parent.name == re.sub(r"\d", "", rule.code).lower()


def test_catalog_is_sorted_and_as_promised() -> None:
    """The catalogue has the promised codes with their severities, in order, each time the same."""
    assert [rule.code for rule in RULES] == sorted({rule.code for rule in RULES})
    assert {rule.code: rule.severity for rule in RULES if rule.code in PROMISED} == PROMISED
    assert catalog() == RULES


def test_every_family_has_its_folder() -> None:
    """Families stand in one table, and their rules in folders of those names."""
    folders = {file.parent.name for file in Path(inspect.getfile(Detector)).parent.glob("*/__init__.py")}
    assert folders == {name.lower() for name in FAMILIES}


def test_planned_codes_are_not_implemented() -> None:
    """A planned code has prose and no rule: whoever writes the rule takes the table away."""
    table = planned()
    assert table
    assert not set(table) & {rule.code for rule in RULES}
    for prose in table.values():
        assert isinstance(prose["severity"], Severity)
        assert {"name", "title", "meaning", "impact", "diagnosis", "causes", "remedy"} <= prose.keys()


def test_nothing_fires_on_a_healthy_run() -> None:
    """All rules together are silent on steps where every tier ran and nothing is wrong."""
    from ddpdebug.detectors.examples import steps

    for world in (1, 2, 4):
        diagnosis = Diagnosis(world=world)
        for step in steps(120, world=world):
            assert diagnosis.feed(step) == []
            assert diagnosis.tick() == []
        assert diagnosis.finish() == []


@pytest.mark.parametrize(
    "text, code",
    [
        (
            "RuntimeError: Input type (torch.cuda.IntTensor) and bias type (torch.IntTensor) should be the same",
            1015,
        ),
        (
            "RuntimeError: Input type (torch.cuda.IntTensor) and bias type (torch.cuda.Half) should be the same",
            1014,
        ),
        ("RuntimeError: Input type (double) and bias type (float) should be the same", 1014),
        ("RuntimeError: unable to open shared memory object </torch_1> in read-write mode", 1039),
        ("sqlite3.OperationalError: unable to open database file", None),
        ("MySQLdb.OperationalError: Lock wait timeout exceeded; try restarting transaction", None),
        ("OSError: [Errno 98] Address already in use", None),
        ("TimeoutError: Timed out while connecting to database", None),
        ("BrokenPipeError: [Errno 32] Broken pipe", None),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", None),
    ],
)
def test_an_error_of_torch_is_told_from_others(text: str, code: int | None) -> None:
    """By its class or by words that nobody else uses; the first rule that knows it counts."""
    assert code_of(f"exception: {text}") == (None if code is None else f"FAIL{code}")
