"""`ddpdebug fix`: diffs for what was found, and whether they cure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from corpus_twins import twin

from ddpdebug.commands import main
from ddpdebug.schema.finding import Finding, Severity

_SCRIPT = "for x in data:\n    loss = model(x)\n    loss.backward()\n    opt.step()\n"


def _run(folder: Path, *findings: Finding, time: str = "2100-01-01T00:00:00Z", **run: Any) -> Path:
    folder.mkdir()
    record = {"run": "r", "world": 2, "command": ["train.py"], "time": time, **run}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    (folder / "findings.jsonl").write_text("".join(f.to_json() + "\n" for f in findings), encoding="utf-8")
    return folder


def _finding(code: str = "RCP808", location: str | None = "train.py:4", **more: Any) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, title="x", location=location, **more)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(_SCRIPT, encoding="utf-8")


@pytest.mark.parametrize("script", [_SCRIPT, "# \x0c ü \u2028\n" + _SCRIPT, _SCRIPT.strip()])
def test_the_diff_can_be_applied(script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output has it and nothing else; the file is as it was until somebody applies it."""
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    line = script.count("\n") + script.endswith("p()")
    _run(
        tmp_path / "run",
        _finding(location=str(tmp_path / f"train.py:{line}")),
        _finding(location=f"train.py:{line}"),
        _finding("RANK101"),
    )
    assert main(["fix", "run"]) == 0
    out, err = capfd.readouterr()
    assert "Clear the gradients after each optimizer step." in err
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == script
    git = shutil.which("git")
    assert git is not None
    subprocess.run([git, "apply", "-"], input=out, text=True, check=True)
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == script.removesuffix("\n") + "\n    opt.zero_grad()\n"


@pytest.mark.parametrize(
    "finding, run, said",
    [
        (_finding(location=None), {}, "names no line"),
        (_finding(location="gone.py:4"), {}, "there is no file gone.py"),
        (_finding(location="/x/site-packages/lib.py:4"), {}, "belongs to a library"),
        (_finding(), {"time": "2000-01-01T00:00:00Z"}, "has changed since the run"),
        (_finding(), {"time": None}, "does not say when it began"),
        (_finding("RANK102", None), {"command": []}, "which file its script was"),
        (_finding("RANK101"), {}, "no change is known"),
    ],
)
def test_what_is_refused(
    finding: Finding, run: dict[str, Any], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the reason, and no diff."""
    _run(tmp_path / "run", finding, **run)
    assert main(["fix", "run"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err


def test_what_stands_elsewhere_is_looked_for_in_the_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where the file of the finding's line has no place for the change."""
    (tmp_path / "train.py").write_text("model = DDP(net)\n", encoding="utf-8")
    (tmp_path / "loop.py").write_text(_SCRIPT, encoding="utf-8")
    _run(tmp_path / "run", _finding("FAIL1001", "loop.py:2"))
    assert main(["fix", "run"]) == 0
    out, _ = capfd.readouterr()
    assert out.splitlines()[:2] == ["--- a/train.py", "+++ b/train.py"]
    assert "+model = DDP(net, find_unused_parameters=True)" in out


def test_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    """What is no run directory has no findings."""
    assert main(["fix", "."]) == 2
    assert "is not a run directory" in capfd.readouterr().err


def _program(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "ddpdebug", *words]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, code, steps, ranks",
    [
        pytest.param("rcp813_clip_before_unscale", "RCP813", 6, 1, marks=pytest.mark.smoke),
        pytest.param("mem403_losses_appended", "MEM403", 40, 2, marks=pytest.mark.thorough),
        pytest.param("rcp808_zero_grad_missing", "RCP808", 6, 2, marks=pytest.mark.thorough),
        pytest.param("sync207_parameter_unused_on_one_rank", "FAIL1001", 60, 2, marks=pytest.mark.thorough),
        pytest.param("data902_set_epoch_missing", "DATA902", 60, 2, marks=pytest.mark.thorough),
        pytest.param("rcp817_layers_in_a_plain_list", "RCP817", 12, 2, marks=pytest.mark.thorough),
        pytest.param("rcp819_regression_head_keeps_its_dimension", "RCP819", 6, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_cure_is_proved(name: str, code: str, steps: int, ranks: int, tmp_path: Path) -> None:
    """The fault is found in a copy and not in the changed copy; the script itself is untouched."""
    script = tmp_path / "train.py"
    text = twin(name, fault=True)
    script.write_text(text, encoding="utf-8")
    options = (f"--nproc-per-node={ranks}", f"--steps={steps}", "--metrics=off", "--fail-on=warning", "--out=run")
    check = _program("check", *options, "train.py")
    assert check.returncode != 0, check.stderr
    done = _program("fix", "run", "--prove", "--code", code)
    assert done.returncode == 0, done.stderr
    assert f"{code}: cured" in done.stderr
    assert script.read_text(encoding="utf-8") == text
