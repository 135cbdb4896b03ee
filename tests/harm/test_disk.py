"""Disk and files: what the job needs, and what a run directory must not tell, in real runs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENCE

pytestmark = [pytest.mark.jobs, pytest.mark.slow]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 440 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=440m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_the_checkpoint_fits_as_without_us(
    run_jobs: Callable[..., Any], compare: Callable[..., list[str]], small: Path
) -> None:
    """Both ranks have bad steps worth a bundle, and the disk has no room for both those and the checkpoint."""
    results = []
    for options in (None, ["--out", str(small / "run"), "--metrics", "off"]):
        job = {"script": "bad_samples.py", "options": options, "args": [str(small / "saved")], "cwd": str(small)}
        results += run_jobs([job])
        assert (small / "saved-more").stat().st_size > 200 << 20
        for file in small.glob("saved*"):
            file.unlink()
    assert compare(*results) == []
    assert results[0][0]["status"] == 0
    outcome = json.loads((small / "run/run.json").read_text())["outcome"]
    assert outcome["not_written"]["bundles"] >= 1
    findings = [json.loads(line) for line in (small / "run/findings.jsonl").read_text().splitlines()]
    assert "NUM305" in {finding["code"] for finding in findings}
    assert list(small.rglob("*.safetensors")) == []


_ROOM = """
from pathlib import Path
from ddpdebug import disk
disk.Volumes.__call__ = lambda self, path: disk.Free(int(Path("free").read_text()) << 20, 1 << 30, None)
"""


@pytest.mark.parametrize(("free", "bundles"), [(600, 0), (900, 2)])
def test_the_size_of_model_and_state_decides(
    run_jobs: Callable[..., Any], tmp_path: Path, free: int, bundles: int
) -> None:
    """Beyond four times 122 MiB both ranks' bundles of 61 MiB fit into 900 MiB; into 600 they would without that."""
    (tmp_path / "free").write_text(str(free))
    options = ["--out", "run", "--metrics", "off"]
    job = {"script": "bad_samples.py", "options": options, "args": ["saved"], "cwd": str(tmp_path)}
    (ranks,) = run_jobs([{**job, "inject": {"0": _ROOM, "1": _ROOM}}])
    assert [rank["status"] for rank in ranks] == [0, 0]
    run = tmp_path / "run"
    found = [*run.glob("bundles/*"), *run.glob("ranks/1/bundles/*")]
    assert (len(found) > 0) is (bundles > 0)
    outcome = json.loads((run / "run.json").read_text())["outcome"]
    assert ("bundles" in outcome.get("not_written", {})) is (bundles == 0)
    for path in tmp_path.glob("saved*"):
        path.unlink()


_SECRETS = [
    "hunter2-and-more",
    "hf_" + "aBcDeFgHiJkLmNoPqRsT",
    "ab12" * 10,
    "p4ssw0rd-of-a-user",
    "only-in-the-environment-7",
]
_SCRIPT = """
import argparse, json, os, sys, urllib.request
from pathlib import Path
import torch
from torch import nn
parser = argparse.ArgumentParser()
for name in ("--api-key", "--hub", "--wandb", "--db"):
    parser.add_argument(name)
given = parser.parse_args()
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    x = torch.ones(2, 4)
    if step == 3:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    model(x).mean().backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0.0)
    optimizer.step()
url = json.loads(Path("run/ranks/0/place.json").read_text())["metrics_url"]
Path("metrics").write_bytes(urllib.request.urlopen(url, timeout=200).read())
raise ValueError(f"cannot log in with {given.api_key} and {given.hub} at {given.db}")
"""


def test_no_secret_of_the_line_or_the_environment_is_written(tmp_path: Path, environment: dict[str, str]) -> None:
    """In no file of the run, the verdict, the report or the metrics; the script itself gets its line as it is."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    key, hub, wandb, password, other = _SECRETS
    words = ["check", "--out", "run", "--junit", "j.xml", "--json", "v.json", "--markdown", "v.md"]
    words += ["--codequality", "c.json", "train.py", "--api-key", key, f"--hub={hub}", "--wandb", wandb]
    words += ["--db", f"postgresql://me:{password}@db/x"]
    done = subprocess.run(
        [sys.executable, "-m", "ddpdebug", *words],
        cwd=tmp_path,
        env={**environment, "MY_SECRET_TOKEN": other, "HF_TOKEN": hub},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert f"cannot log in with {key}" in done.stderr  # the script's own words are its own
    subprocess.run([sys.executable, "-m", "ddpdebug", "report", "run"], cwd=tmp_path, env=environment, check=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "train.py"]
    names = {path.name for path in files}
    assert {"run.json", "bundle.json", "j.xml", "v.json", "v.md", "report.html", "metrics", "outcome.json"} <= names
    leaks = [(path.name, secret) for path in files for secret in _SECRETS if secret.encode() in path.read_bytes()]
    assert leaks == []
    command = json.loads((tmp_path / "run/run.json").read_text())["command"]
    assert command[-7:] == ["--api-key", "***", "--hub=***", "--wandb", "***", "--db", "postgresql://***@db/x"]
    assert "cannot log in with ***" in (tmp_path / "run/ranks/0/outcome.json").read_text()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*") if path.is_dir()} == {0o700}
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    ours = "\n".join(line for line in done.stderr.splitlines() if line.startswith("ddpdebug:"))
    assert not [secret for secret in _SECRETS if secret in ours]
