"""What CI runs: for each change `.ci/run`, at night `.ci/nightly`; what fails fails it, and no test is in neither."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

_ROOT = Path(__file__).resolve().parent.parent.parent
_MAKEFILE = (_ROOT / "Makefile").read_text(encoding="utf-8")
_NIGHTLY = re.search(r"^NIGHTLY := (.*)$", _MAKEFILE, re.MULTILINE)[1].split()  # type: ignore[index]
#: What `.ci/run` has make do. Lint and the site are made beside each other.
_TARGETS = (".venv/.installed", "lint site", "test-change", "sample")


def _ci(folder: Path, *failing: str) -> tuple[int, str]:
    """Run CI with programs that only say that they were called; `failing` targets of make fail."""
    fails = "".join(f'*" {target} "*) exit 2;; ' for target in failing)
    say = 'words=; for w; do case $w in -*) ;; *) words="$words $w";; esac; done; echo "called$words"'
    for name, text in (("make", f'{say}; case "$words " in {fails} *) ;; esac'), ("apt-get", "exit 0")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([_ROOT / ".ci" / "run"], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_all_passes(tmp_path: Path) -> None:
    """Each target runs once, and nothing again."""
    status, out = _ci(tmp_path)
    assert status == 0
    called = [line.removeprefix("called ") for line in out.splitlines() if line.startswith("called")]
    assert called == list(_TARGETS)


@pytest.mark.parametrize("target", " ".join(_TARGETS).split())
def test_what_fails_fails(target: str, tmp_path: Path) -> None:
    """Whichever it is."""
    for i, failing in enumerate(((target, "retest"), (target,))):
        own = tmp_path / str(i)  # what the first one has started may still run
        own.mkdir()
        assert _ci(own, *failing)[0] != 0


def test_a_second_run_is_only_a_diagnosis(tmp_path: Path) -> None:
    """Tests that pass alone have failed all the same, and the log says that they do."""
    status, out = _ci(tmp_path, "test-change")
    assert status != 0
    assert "test-change failed; pass alone: yes" in out
    assert "called sample" in out
    assert "test-change failed; pass alone: no" in _ci(tmp_path, "test-change", "retest")[1]


def test_nightly_goes_on_after_a_failure(tmp_path: Path) -> None:
    """Every part runs, and the last line names those that failed."""
    make = tmp_path / "part"
    make.write_text('#!/bin/sh\ncase "$*" in *test-slow) exit 2;; esac\n')
    make.chmod(0o755)
    words = ["make", "--no-print-directory", "nightly", f"MAKE={make}"]
    done = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.findall(r"^== (\S+),", done.stdout, re.MULTILINE) == [*_NIGHTLY, "nightly"]
    assert done.stdout.rstrip().endswith("failed: test-slow ==")


def _chosen_by(target: str) -> Expression:
    recipe = re.search(rf"^{target}: .*\n\t.*-m (\"[^\"]+\"|\w+)", _MAKEFILE, re.MULTILINE)
    assert recipe is not None, f"{target} chooses tests by no mark"
    return Expression.compile(recipe[1].strip('"'))


def test_no_test_is_in_neither() -> None:
    """Whatever marks a test has, something that CI or the night runs chooses it, and CI what `make test` chooses."""
    tests = [_chosen_by(target) for target in ("test-change", *_NIGHTLY) if target.startswith("test")]
    change, quick = _chosen_by("test-change"), _chosen_by("test")
    for slow, thorough, smoke in itertools.product((False, True), repeat=3):
        marks = {"slow": slow or thorough, "thorough": thorough, "smoke": smoke}  # thorough is slow: tests/conftest.py
        assert any(test.evaluate(marks.__getitem__) for test in tests), marks
        assert change.evaluate(marks.__getitem__) or not quick.evaluate(marks.__getitem__), marks


def test_workflows_run_the_same_two_commands() -> None:
    """A public host runs what CI runs here."""
    folder = _ROOT / ".github" / "workflows"
    commands = {p.stem: re.findall(r"^ +- run: (\.ci/\w+)$", p.read_text(), re.MULTILINE) for p in folder.iterdir()}
    assert commands == {"change": [".ci/run"], "nightly": [".ci/nightly"]}
