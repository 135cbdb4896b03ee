"""The score is worth something when a run that never began counts against it, and what is held out stays unseen."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ddpdebug.detectors.pages import pages
from ddpdebug.schema.finding import Finding, Severity

_SCORE = Path(__file__).with_name("score.py")
_TESTS = Path(__file__).resolve().parent.parent
_HELD_OUT = sorted((_TESTS / "held_out").glob("*.py"))
#: Keys of a head (tests/corpus/README.md).
_KEYS = {"title", "source", "nproc", "expect.codes", "plain_pytorch", "options"}
_WHERE = ("ranks", "subject", "step", "step_slack", "module", "op", "location", "phase")
_OF_FAULTS = {f"expect.{key}" for key in _WHERE}


@pytest.fixture(scope="module")
def score() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("score_of_the_corpus", _SCORE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its data classes look there for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.smoke
def test_a_script_that_did_not_run_is_neither_found_nor_clean():
    """An environment in which no run starts fails the score of faults and of healthy scripts alike, and says why."""
    env = {**os.environ, "DDPDEBUG_NO_SUCH_OPTION": "1"}
    words = ["--only", "clean_lbfgs_closure,data901_same_seed"]
    done = subprocess.run([sys.executable, str(_SCORE), *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.count("did not run, exit status 2") == 3
    assert "unknown option DDPDEBUG_NO_SUCH_OPTION" in done.stdout
    assert "0 passed, 3 failed" in done.stdout


@pytest.mark.parametrize("path", _HELD_OUT, ids=range(len(_HELD_OUT)))
def test_a_held_out_script_is_well_formed(score: ModuleType, path: Path) -> None:
    """Its head promises codes that are detected, FAULT switches them on, and its name does not tell them."""
    case, text = score.load(path), path.read_text()
    compile(text, path.name, "exec")
    assert case.keys.keys() >= {"title", "source", "nproc", "expect.codes", "plain_pytorch"}
    assert case.keys["plain_pytorch"] in {"silent", "error"}
    assert 1 <= int(case.keys["nproc"]) <= 4
    assert "ddpdebug" not in text
    assert not re.match(r"clean_|healthy_|[a-z]+\d{3}", path.name)
    if not case.codes:
        assert case.keys.keys() <= _KEYS
        assert "FAULT" not in text
        return
    assert case.keys.keys() <= _KEYS | _OF_FAULTS
    assert case.keys.keys() >= {"expect.ranks", "expect.subject", "expect.step"}
    known = pages()
    assert set(case.codes) <= known.keys()
    assert known[case.codes[0]].detected
    assert re.search(r"""environ(\.get\(|\[)"FAULT\"""", text)
    lines = text.splitlines()
    for place in case.keys.get("expect.location", "").split(",") if "expect.location" in case.keys else []:
        name, _, number = place.strip().rpartition(":")
        assert name == path.name
        assert lines[int(number) - 1].strip()


def test_held_out_scripts_cover_the_families(score: ModuleType) -> None:
    """Thirty faults and ten healthy scripts at least, of which the corpus has none."""
    cases = [score.load(path) for path in _HELD_OUT]
    faults = [case for case in cases if case.codes]
    assert len(faults) >= 30
    assert len(cases) - len(faults) >= 10
    families = {re.split(r"\d", case.codes[0])[0] for case in faults}
    assert families >= {"RANK", "SYNC", "NUM", "MEM", "FAIL", "HLTH", "RCP", "DATA"}
    assert not {path.name for path in _HELD_OUT} & {path.name for path in (_TESTS / "corpus").glob("*.py")}
    titles = [case.keys["title"] for case in cases]
    assert len(titles) == len(set(titles))


def test_a_held_out_run_names_nothing_unless_asked_to(
    score: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Totals without names of scripts or findings; `--reveal` prints them after a warning, `--only` needs it."""
    (tmp_path / "garden.py").write_text("# title: x\n# nproc: 1\n# expect.codes: DATA901\n")
    (tmp_path / "meadow.py").write_text("# title: y\n# nproc: 1\n# expect.codes: none\n")
    alarm = Finding(code="NUM301", severity=Severity.ERROR, title="t", step=1, subject=("layer.weight",))

    def ran(case: object, *, fault: bool, launch: bool, record: bool) -> object:
        assert not record
        return score.Result(case, fault, [alarm], 1.0, problems=["false alarm of layer.weight"] * (not launch))

    monkeypatch.setattr(score, "run", ran)
    monkeypatch.setattr(score.zygote, "preload", lambda: None)
    monkeypatch.setattr(score.zygote, "spare_the_collector", lambda: None)

    def scored(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["score.py", "--held-out", "--folder", str(tmp_path), *words])
        return score.main(), capsys.readouterr().out

    status, totals = scored()
    assert status == 1
    assert "faults found: **0 of 1**" in totals
    assert "| DATA | 1 | 0 | 0 | 0 | 1 | 0 |" in totals
    assert "| healthy | 0 | 0 | 0 | 0 | 1 | 0 |" in totals
    assert not re.search("garden|meadow|NUM301|layer", totals)
    _, revealed = scored("--reveal")
    assert revealed.startswith("warning: who reads this writes no rules for it")
    assert all(word in revealed for word in ("garden", "meadow", "NUM301", "layer"))
    with pytest.raises(SystemExit):
        scored("--only", "garden")
    assert "--only needs --reveal" in capsys.readouterr().err


def test_either_score_leaves_the_other_on_the_page(score: ModuleType, tmp_path: Path) -> None:
    """What is held out stands above the scripts of the corpus, without names, whichever was run last."""
    page = tmp_path / "docs" / "detection.md"
    for name, code in (("garden.py", "NUM301"), ("meadow.py", "NUM305")):
        (tmp_path / name).write_text(f"# title: x\n# nproc: 1\n# expect.codes: {code}\n")

    def result(name: str, codes: list[str]) -> object:
        findings = [Finding(code=code, severity=Severity.ERROR, title="t", step=1, ranks=(0,)) for code in codes]
        case = score.load(tmp_path / name)
        problems, unlocated = score.judge_fault(case, findings)
        return score.Result(case, fault=True, findings=findings, seconds=1.0, problems=problems, unlocated=unlocated)

    score._write(page, [result("garden.py", ["NUM301"])], held_out=True)
    score._write(page, [result("meadow.py", [])], held_out=False)
    text = page.read_text()
    assert text.count("## Held out") == text.count("## Scripts of the corpus") == 1
    assert text.index("0 of 1") < text.index("## Held out") < text.index("1 of 1") < text.index("| meadow | fault |")
    assert "garden" not in text
    score._write(page, [result("garden.py", [])], held_out=True)
    assert "1 of 1" not in page.read_text()
    assert page.read_text().count("0 of 1") == 2
