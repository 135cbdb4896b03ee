"""`ddpdebug bisect`: the commit that brought a bad verdict, found by `git bisect run` in a worktree of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ddpdebug.ci.bisect_probe import GOOD, SKIP, Plan, probe
from ddpdebug.commands._progress import progress
from ddpdebug.commands._target import TargetCommand, click_option, target_of
from ddpdebug.config.settings import Config, options, to_flags
from ddpdebug.errors import UsageError
from ddpdebug.printing import say
from ddpdebug.sinks.text import clean

_TEXT = """Find the commit that turned the verdict of `ddpdebug check` bad, with `git bisect run`.

The commits are checked out in a temporary worktree; the checkout in this folder is not touched. A commit is bad when
its verdict is the one of --bad, good when it is clean, and anything else (it does not build, there is no script) is
skipped. Exit codes: 0 the commit is named, 1 only commits that cannot be tested are left, 2 wrong usage.
"""
#: Options of `check` that a bisection decides itself.
_OWN = {"out", "json", "junit", "markdown", "codequality", "self_test", "record", "golden", "quiet", "status"}
_EXTRA = (
    click.Option(["--good"], metavar="REV", required=True, help="A commit whose verdict is clean."),
    click.Option(["--bad"], metavar="REV", default="HEAD", show_default=True, help="A commit whose verdict is bad."),
    click.Option(
        ["--repeat"],
        type=click.IntRange(1, 99),
        default=1,
        show_default=True,
        help="Check each commit so often, for verdicts that are not always the same; the majority decides.",
    ),
)


@click.pass_context
def _callback(ctx: click.Context, /, good: str, bad: str, repeat: int, **values: Any) -> Callable[[], int]:
    given = {name: value for name, value in values.items() if value is not None}
    Config.load(given, os.environ, Path.cwd(), flags=True)
    target = target_of(ctx.obj, "bisect")
    root, prefix = _git("rev-parse", "--show-toplevel"), _git("rev-parse", "--show-prefix")
    good, bad = (_git("rev-parse", "--verify", "--end-of-options", f"{rev}^{{commit}}") for rev in (good, bad))
    words = [*to_flags(given, "check"), *target.command]
    return lambda: _act(Path(root), prefix, good, bad, (words, repeat))


def _act(root: Path, prefix: str, good: str, bad: str, what: tuple[list[str], int]) -> int:
    with tempfile.TemporaryDirectory(prefix="ddpdebug-") as scratch:
        tree = Path(scratch) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(tree), bad, cwd=root)
        try:
            plan = Plan(words=what[0], repeat=what[1], folder=scratch, prefix=prefix)
            plan = _ends(plan, tree, good, bad)
            return _search(plan, tree, good, bad)
        finally:
            _git("worktree", "remove", "--force", str(tree), cwd=root, check=False)
            _git("worktree", "prune", cwd=root, check=False)


def _ends(plan: Plan, tree: Path, good: str, bad: str) -> Plan:
    """Check both ends, and return the plan with what is bad about the bad one."""
    _say("checking both ends")
    with progress("bisect: the commit of --bad"):
        found = probe(plan, tree, bad)
    if found["code"] in {0, 2}:
        raise UsageError(f"the commit of --bad, {bad[:12]}, is not bad: its verdict is {clean(found['verdict'])}")
    plan = plan.against(found)
    _git("checkout", "--quiet", "--detach", good, cwd=tree)
    with progress("bisect: the commit of --good"):
        found = probe(plan, tree, good)
    if found["answer"] != GOOD:
        raise UsageError(f"the commit of --good, {good[:12]}, is not good: its verdict is {clean(found['verdict'])}")
    return plan


def _search(plan: Plan, tree: Path, good: str, bad: str) -> int:
    file = Path(plan.folder) / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    _git("bisect", "start", bad, good, cwd=tree)
    # -P: the folder of the commit must not shadow ddpdebug
    probing = [sys.executable, "-P", "-m", "ddpdebug.ci.bisect_probe", str(file)]
    with progress("bisect: testing commits"):
        subprocess.run(  # noqa: S603 - our own words
            [*_GIT, "bisect", "run", *probing], cwd=tree, env=_environ(), check=False, stdout=subprocess.DEVNULL
        )
    goods = _git("for-each-ref", "--format=%(objectname)", "refs/bisect/good-*", cwd=tree).split()
    first = _git("rev-parse", "refs/bisect/bad", cwd=tree)
    left = _git("rev-list", first, "--not", *goods, cwd=tree).split()
    known = plan.known()
    others = [commit for commit in left if commit != first]
    if others and all(known.get(commit, {}).get("answer") == SKIP for commit in others):
        _say(f"the commit is one of these {len(left)}; all but the first cannot be tested:")
        for commit in left:
            _say(f"  {_title(commit, tree)}")
        return 1
    if left != [first]:
        raise UsageError("git bisect did not come to an end; see its message above")
    _say(f"first bad commit: {_title(first, tree)}")
    _tell(known.get(first, {}))
    return 0


def _tell(found: Mapping[str, Any]) -> None:
    _say(f"  verdict: {clean(found.get('verdict', ''))}")
    for line in found.get("findings", ()):
        _say(f"  {clean(line)}")


def _title(commit: str, tree: Path) -> str:
    return clean(_git("log", "-1", "--format=%h %an, %as: %s", commit, cwd=tree))


def _say(text: str) -> None:
    say(f"ddpdebug: bisect: {text}\n")


#: No hook of the repository runs because of us.
_GIT = ("git", "-c", f"core.hooksPath={os.devnull}", "-c", "advice.detachedHead=false")


def _git(*words: str, cwd: Path | None = None, check: bool = True) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own words
            [*_GIT, *words], cwd=cwd, env=_environ(), capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise UsageError(f"git cannot be started: {error.strerror}; bisect needs it") from None
    if done.returncode != 0 and check:
        raise UsageError(f"git {words[0]}: {clean(done.stderr.strip() or f'exit code {done.returncode}')}")
    return done.stdout.strip()


def _environ() -> dict[str, str]:
    """Return the environment without what would point git to another repository."""
    return {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}


def _parameters() -> Sequence[click.Parameter]:
    return [*_EXTRA, *(click_option(option) for option in options("check") if option.name not in _OWN)]


command = TargetCommand("bisect", callback=_callback, params=list(_parameters()), help=_TEXT)
