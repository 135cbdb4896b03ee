"""`ddpdebug bisect`: the planted commit is found, and the user's checkout is left alone."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]

_SCRIPT = """
import os
from pathlib import Path
import torch
import settings

number, flaky = settings.number, Path(os.environ.get("TEST_FLAKY", "/nonexistent"))
bad = number >= {planted}
if number == {flaky} and not flaky.exists():  # once
    flaky.touch()
    bad = True
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    loss = model(torch.ones(4, 2)).square().mean()
    loss = (loss - 1e9).log() if bad else loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
#: The flaky one and the first broken one are on the way of the search.
PLANTED, FLAKY, BROKEN = 27, 18, (23, 25)


def _git(repository: Path, *words: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *words], cwd=repository, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _commit(repository: Path, number: int) -> str:
    text = "import no_such_module\n" if number in BROKEN else ""
    (repository / "settings.py").write_text(f"{text}number = {number}\n", encoding="utf-8")
    _git(repository, "commit", "-qam", f"change {number}")
    return _git(repository, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, list[str]]:
    """Make 40 commits with a merge among them, two that do not build and one whose verdict is not always the same."""
    folder = tmp_path / "repository"
    folder.mkdir()
    _git(folder, "init", "-q")
    (folder / "train.py").write_text(_SCRIPT.format(planted=PLANTED, flaky=FLAKY), encoding="utf-8")
    (folder / "settings.py").touch()
    _git(folder, "add", ".")
    commits = []
    for number in range(39):
        if number == 12:
            _git(folder, "checkout", "-qb", "side", commits[8])
            (folder / "notes.txt").write_text("side", encoding="utf-8")
            _git(folder, "add", ".")
            _git(folder, "commit", "-qm", "side")
            _git(folder, "checkout", "-q", "main")
            _git(folder, "merge", "-q", "--no-edit", "side")
        commits.append(_commit(folder, number))
    (folder / "hook").mkdir()
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.write_text("#!/bin/sh\ntouch hook-ran\n", encoding="utf-8")
    hook.chmod(0o755)
    (folder / "settings.py").write_text("number = 5  # not committed\n", encoding="utf-8")
    return folder, commits


def _state(folder: Path) -> tuple[str, ...]:
    worktrees = _git(folder, "worktree", "list")
    return (
        *(_git(folder, *words.split()) for words in ("status --porcelain", "rev-parse HEAD", "for-each-ref")),
        worktrees,
    )


@pytest.mark.slow
def test_planted_commit_is_found(command: Command, repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Through a merge, commits that do not build and a flaky one, without a trace in the user's repository."""
    folder, commits = repository
    before = _state(folder)
    words = ("-m", "ddpdebug", "bisect", "--good", commits[0], "--bad", "main", "--repeat", 3, "--", "train.py")
    done = command(*words, cwd=folder, TEST_FLAKY=str(tmp_path / "flaky"))
    assert done.returncode == 0, done.stderr
    assert f"first bad commit: {commits[PLANTED][:7]} A" in done.stderr
    assert f"change {PLANTED}" in done.stderr
    assert "NUM302" in done.stderr
    assert f"{commits[FLAKY][:12]} good (findings, clean, clean)" in done.stderr
    assert "skip (script failed" in done.stderr
    assert _state(folder) == before
    assert not (folder / "hook-ran").exists()


@pytest.mark.thorough
def test_untestable_commits_are_named(command: Command, repository: tuple[Path, list[str]]) -> None:
    """Where the culprit may hide behind a commit that does not build, all that remain are named."""
    folder, commits = repository
    _git(folder, "checkout", "-q", "--force", commits[26])
    (folder / "settings.py").write_text("number = 99\n", encoding="utf-8")
    _git(folder, "commit", "-qam", "bad")
    done = command("-m", "ddpdebug", "bisect", "--good", commits[24], "--", "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr  # the one before it is good: no doubt
    broken = commits[25]
    _git(folder, "checkout", "-q", "--force", broken)
    (folder / "settings.py").write_text("number = 99\n", encoding="utf-8")
    _git(folder, "commit", "-qam", "bad")
    done = command("-m", "ddpdebug", "bisect", "--good", commits[24], "--", "train.py", cwd=folder)
    assert done.returncode == 1, done.stderr
    assert "one of these 2" in done.stderr
    assert f"change {25}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, message",
    [
        ((), "missing option '--good'"),
        (("--good", "HEAD"), "no script given"),
        (("--good", "no-such", "--", "train.py"), "git rev-parse"),
        (("--good", "HEAD", "--repeat", "0", "--", "train.py"), "--repeat"),
        (("--good", "HEAD~1", "--", "train.py"), "is not good"),
        (("--good", "HEAD~30", "--bad", "HEAD~25", "--", "train.py"), "is not bad"),
    ],
)
def test_wrong_usage(
    words: tuple[str, ...], message: str, command: Command, repository: tuple[Path, list[str]]
) -> None:
    """Ends that are none, and commits that do not exist, are said before anything is searched."""
    folder, _ = repository
    done = command("-m", "ddpdebug", "bisect", *words, cwd=folder)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert _git(folder, "worktree", "list").count("\n") == 0


def test_outside_of_a_repository(command: Command) -> None:
    """A folder without a repository is wrong usage."""
    done = command("-m", "ddpdebug", "bisect", "--good", "a", "--", "train.py", GIT_CEILING_DIRECTORIES="/")
    assert (done.returncode, "git rev-parse" in done.stderr) == (2, True), done.stderr
