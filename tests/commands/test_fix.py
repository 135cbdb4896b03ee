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
from ddpdebug.cures.cures import CURES
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


#: The script of the corpus in which each cure is proved.
_CORPUS = {
    "DATA901": "data901_same_seed_no_sampler",
    "DATA902": "data902_set_epoch_missing",
    "FAIL1001": "sync207_parameter_unused_on_one_rank",
    "FAIL1016": "fail1016_device_of_a_cpu_model",
    "FAIL1030": "fail1030_prefix_of_the_wrapper",
    "FAIL1034": "fail1034_scaler_never_updated",
    "FAIL1043": "fail1043_attribute_behind_the_wrapper",
    "FAIL1044": "fail1044_last_batch_of_one_sample",
    "MEM403": "mem403_losses_appended",
    "RANK102": "rank102_batch_norm_without_broadcast",
    "RANK110": "rank110_noise_alike_on_all_ranks",
    "RCP802": "rcp802_softmax_in_the_model",
    "RCP804": "rcp804_eval_mode_left_after_validation",
    "RCP806": "rcp806_scheduler_in_micro_batch_loop",
    "RCP808": "rcp808_zero_grad_missing",
    "RCP809": "rcp809_window_not_divided",
    "RCP813": "rcp813_clip_before_unscale",
    "RCP816": "rcp816_cleared_before_the_step",
    "RCP817": "rcp817_layers_in_a_plain_list",
    "RCP819": "rcp819_regression_head_keeps_its_dimension",
    "SYNC202": "sync202_loop_of_a_single_process",
}
#: Those that show at once; the others are checked for 60 steps.
_STEPS = {"RCP808": 6, "RCP813": 6, "RCP819": 6, "RCP817": 12, "RCP816": 12, "RCP802": 12}


def _faulty(code: str) -> str:
    text = twin(_CORPUS[code], fault=True)
    unused = "DistributedSampler(" if code == "DATA901" else None  # what only the twin without the fault uses
    return "".join(line for line in text.splitlines(keepends=True) if unused is None or unused not in line)


def test_each_cure_has_a_script_that_proves_it() -> None:
    """None is only believed."""
    assert CURES.keys() == _CORPUS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [pytest.param(code, marks=pytest.mark.smoke if code == "RCP813" else pytest.mark.thorough) for code in CURES],
)
def test_a_cure_is_proved(code: str, tmp_path: Path) -> None:
    """The fault is found in a copy and not in the changed copy; the script itself is untouched."""
    script = tmp_path / "train.py"
    text = _faulty(code)
    script.write_text(text, encoding="utf-8")
    ranks = 1 if code == "RCP813" else 2
    options = (f"--nproc-per-node={ranks}", f"--steps={_STEPS.get(code, 60)}", "--metrics=off", "--out=run")
    check = _program("check", *options, "train.py")
    assert code in check.stderr
    done = _program("fix", "run", "--prove", "--code", code)
    assert done.returncode == 0, done.stderr
    assert f"{code}: cured" in done.stderr
    assert script.read_text(encoding="utf-8") == text
