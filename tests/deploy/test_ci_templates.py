"""The templates of `deploy/ci`: valid for the services that read them, with options that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ddpdebug.commands._target import prepare
from ddpdebug.config.settings import options

CI = Path(__file__).parent.parent.parent / "deploy" / "ci"
_TEMPLATES = sorted(path.name for path in CI.iterdir())


def _load(name: str) -> Any:
    return yaml.safe_load((CI / name).read_text(encoding="utf-8"))


def _schema_errors(kind: str, file: Path) -> str:
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}", "-o", "json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return "" if json.loads(done.stdout)["status"] == "ok" else done.stdout


@pytest.mark.parametrize("kind, name", [("github-workflows", "github-actions.yml"), ("gitlab-ci", "gitlab-ci.yml")])
def test_schema(kind: str, name: str, tmp_path: Path) -> None:
    """The template satisfies the service's own schema, which refuses a broken one."""
    assert _schema_errors(kind, CI / name) == ""
    text = (CI / name).read_text(encoding="utf-8")
    wrong = tmp_path / name
    wrong.write_text(text.replace("script:", "scripts:").replace("steps:", "step:"), encoding="utf-8")
    assert _schema_errors(kind, wrong) != ""


def test_kubernetes_job() -> None:
    """The Job is valid, runs without rights, tries no verdict again and names its claim."""
    job = _load("kubernetes-job.yaml")
    kubernetes_validate.validate(job, "1.30", strict=True)
    (rule, _) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [1, 2, 3, 4]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**job, "spec": {**job["spec"], "backoffLimits": 1}}, "1.30", strict=True)


def test_artifacts_are_kept_whatever_the_verdict() -> None:
    """A red check is the one whose files are wanted."""
    upload = _load("github-actions.yml")["jobs"]["check"]["steps"][-1]
    assert (upload["if"], upload["with"]["path"]) == ("always()", "ddpdebug-run")
    artifacts = _load("gitlab-ci.yml")["ddpdebug"]["artifacts"]
    assert artifacts["when"] == "always"
    assert set(artifacts["reports"]) == {"junit", "codequality"}


def _lines(name: str) -> str:
    """Return the words of the commands in a template."""
    if name == "kubernetes-job.yaml":
        container = _load(name)["spec"]["template"]["spec"]["containers"][0]
        return " ".join([*container["command"], *container["args"]])
    if name == "gitlab-ci.yml":
        return " ".join(_load(name)["ddpdebug"]["script"])
    if name == "github-actions.yml":
        return " ".join(step.get("run", "") for step in _load(name)["jobs"]["check"]["steps"])
    lines = (CI / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("name", _TEMPLATES)
def test_options_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every template's command line is one that ddpdebug takes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    lines = re.findall(r"ddpdebug (check|verdict) (.*)", _lines(name))
    assert lines
    for command, words in lines:
        flags = set(re.findall(r"--[a-z][a-z-]+", words))
        assert flags
        assert flags - {option.flag for option in options(command)} == set()
    if name != "slurm.sbatch":
        given = re.findall(r"--([a-z-]+)[= ]([^- ][^ ]*)", lines[0][1])
        values = {key.replace("-", "_"): value for key, value in given if not value.startswith("/")}
        assert prepare({k: v for k, v in values.items() if k != "quiet"}, ["train.py"], "check").config.timeout > 60


def test_batch_script_parses() -> None:
    """The batch script is a shell script without syntax errors."""
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-n", str(CI / "slurm.sbatch")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
