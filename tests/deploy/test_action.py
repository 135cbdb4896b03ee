"""The action at the repository's root: valid for GitHub, and what it is given stays data."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

_FILE = Path(__file__).parent.parent.parent / "action.yml"
_FAKE = """#!{python}
import json, os, sys
with open("lines.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if "verdict" in sys.argv:
    print("{{}}")
sys.exit(int(os.environ["FAKE_CODE"]))
"""


def _step(name: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))["runs"]["steps"]
    return next(step for step in steps if step.get("id") == name)


def test_schema() -> None:
    """It satisfies the service's own schema."""
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions", str(_FILE)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_text_that_is_given_becomes_a_part_of_a_script() -> None:
    """Expressions of GitHub stand in variables alone."""
    steps = yaml.safe_load(_FILE.read_text(encoding="utf-8"))["runs"]["steps"]
    assert [step["run"] for step in steps if "${{" in step["run"]] == []


@pytest.mark.parametrize("code", [0, 1, 3])
def test_what_it_runs(code: int, tmp_path: Path) -> None:
    """`check` with each line one word, whatever is in it, then SARIF; the step ends as the check has."""
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python"
    fake.write_text(_FAKE.format(python=sys.executable), encoding="utf-8")
    fake.chmod(0o755)
    (tmp_path / "out").mkdir()
    step = _step("check")
    given = {
        "SCRIPT": "train.py",
        "ARGS": "--name\n$(touch evil) `touch evil`; touch evil\n\n--lr=1",
        "OPTIONS": "--every-step\n--name=a b",
        "RANKS": "2",
        "STEPS": "5",
        "SECONDS_MOST": "60",
        "FAIL_ON": "error",
        "OUT": "out",
    }
    assert given.keys() == step["env"].keys()
    env = {**os.environ, **given, "GITHUB_OUTPUT": str(tmp_path / "outputs"), "FAKE_CODE": str(code)}
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"
    words = [bash, "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    check, verdict = map(json.loads, (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines())
    assert check[:3] == ["-m", "ddpdebug", "check"]
    assert check[-6:] == [
        *("--every-step", "--name=a b", "train.py"),
        *("--name", "$(touch evil) `touch evil`; touch evil", "--lr=1"),
    ]
    assert verdict[2:] == ["verdict", "--format=sarif", "--fail-on=error", "out"]
    assert not (tmp_path / "evil").exists()
    outputs = (tmp_path / "outputs").read_text(encoding="utf-8").splitlines()
    assert outputs == [f"exit-code={code}", "sarif=out/verdict.sarif"]
