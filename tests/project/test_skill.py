"""The short way from a symptom to a cause: its commands work, in its order, and its links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from corpus_twins import twin

from ddpdebug.detectors.pages import pages

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
_SKILL = (DOCS / "skill.md").read_text(encoding="utf-8")


def _commands() -> list[str]:
    """Return the lines that are commands with all their words."""
    return [line for line in re.findall(r"`ddpdebug ([^`]+)`", _SKILL) if " " in line]


def test_it_is_short_and_says_what_it_is_for() -> None:
    """Name and description stand at its head, as programs that choose among such files expect; codes exist."""
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", _SKILL, re.DOTALL).groups()  # type: ignore[union-attr]
    assert re.fullmatch(r"name: [a-z-]+\ndescription: [^\n]{40,300}", head)
    assert len([line for line in body.splitlines() if line]) <= 25
    assert set(re.findall(r"\b[A-Z]{2,4}\d{3}\b", body)) <= pages().keys()


def test_what_programs_read_is_there() -> None:
    """`llms.txt` begins with a title and a summary, and every link of it is a page."""
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# ddpdebug\n\n> ", text)
    links = re.findall(r"^- \[[^]]+\]\(([^)]+)\): .+$", text, re.MULTILINE)
    assert len(links) > 8
    assert [link for link in links if not (DOCS / link).is_file()] == []


@pytest.mark.slow
@pytest.mark.smoke
def test_the_commands_lead_to_the_cause(tmp_path: Path) -> None:
    """On a script that never clears its gradients, each does what the page says."""
    (tmp_path / "train.py").write_text(twin("rcp808_zero_grad_missing", fault=True), encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = {}
    for line in _commands():
        words = [sys.executable, "-m", "ddpdebug", *shlex.split(line)]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == (1 if line.startswith(("check", "verdict")) else 0), done.stdout + done.stderr
        outputs[line.partition(" ")[0]] = done.stdout
    assert outputs.keys() >= {"check", "verdict", "explain", "top", "stacks", "fix", "report"}
    (finding,) = json.loads(outputs["verdict"])["findings"]
    assert finding["code"] == "RCP808"
    assert finding["code"] in outputs["explain"]
    assert "+        opt.zero_grad()" in outputs["fix"]
    assert (tmp_path / outputs["report"].strip()).is_file()
