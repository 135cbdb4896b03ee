"""Each program of the table says what it is and has faults that can be put in; two are run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from ddpdebug.detectors.catalog import catalog

_HERE = Path(__file__).resolve().parent


def _driver():
    """Load `run.py` as a module; its folders are on the path only while it is loaded."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("programs_run", _HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["programs_run"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


driver = _driver()
_ALL = driver.programs()


def test_there_are_enough_programs():
    """At least 25, most of which need nothing that is not installed, on one rank and on several."""
    assert len(_ALL) >= 25
    assert sum(not program.packages for program in _ALL) >= 20
    assert {1, 2} <= {program.ranks for program in _ALL}


@pytest.mark.parametrize("program", _ALL, ids=lambda program: program.path.stem)
def test_a_program_is_well_formed(program):
    """It names what it is written after, and has a fault that leaves a program, with codes that rules can report."""
    codes = {rule.code for rule in catalog()}
    assert program.title.endswith(".")
    assert bool(program.manner) != bool(program.packages)
    assert program.faults
    for fault in program.faults:
        changed = program.changed(fault)
        compile(changed, program.path.name, "exec")
        assert changed != program.text
        assert set(fault.codes) <= codes
        assert fault.where is None or fault.where in changed[changed.index('"""', 3) :]


def test_the_faults_are_of_many_kinds():
    """Of every family that is about the ranks, the numbers and the loop."""
    families = {fault.codes[0].rstrip("0123456789") for program in _ALL for fault in program.faults}
    assert families >= {"RANK", "SYNC", "NUM", "MEM", "HLTH", "RCP", "DATA", "FAIL"}


def test_a_change_that_fits_nowhere_is_refused(tmp_path):
    """Or in two places: the file and the fault are named."""
    head = '"""A.\n\nmanner = "b"\n\n[[fault]]\nname = "c"\nold = "x = 1"\nnew = ""\ncodes = ["RCP808"]\n"""\n'
    path = tmp_path / "a.py"
    for text, count in (("y = 1\n", 0), ("x = 1\nx = 1\n", 2)):
        path.write_text(head + text)
        with pytest.raises(ValueError, match=rf"a\.py: 'c': .* `old` stands {count} times"):
            driver.read(path)
    path.write_text(head + "x = 1\n")
    program = driver.read(path)
    assert program.changed(program.faults[0]) == head + "\n"


def test_a_missing_package_is_a_line_and_no_failure(tmp_path, capsys):
    """The programs that need it are skipped, on the page as well."""
    page = tmp_path / "programs.md"
    (tmp_path / "a.py").write_text('"""A.\n\npackages = ["no_such_trainer"]\n"""\n')
    assert driver.main(["--folder", str(tmp_path), "--write", str(page)]) == 0
    assert "skip a: no_such_trainer is not installed" in capsys.readouterr().out
    assert "| a | not run: no_such_trainer is not installed |" in page.read_text()


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_tutorial_single", "llmc_zero"])
def test_programs_are_run_and_judged(name, tmp_path, capsys):
    """Healthy and faulty, plain and attached: alike, the fault is found, and all of it stands on the page."""
    page = tmp_path / "programs.md"
    status = driver.main(["--only", name, "--write", str(page)])
    assert status == 0, capsys.readouterr().out
    rows = [line for line in page.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert len(rows) == 2
    assert all(row.endswith(("| the same |", "; the same |")) for row in rows)
    (program,) = [p for p in _ALL if p.path.stem == name]
    assert program.faults[0].codes[0] in rows[1]
