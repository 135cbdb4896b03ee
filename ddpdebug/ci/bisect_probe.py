"""One commit of a bisection: `python -m ddpdebug.ci.bisect_probe PLAN` answers as `git bisect run` asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ddpdebug.ci.checked import checked
from ddpdebug.ci.verdict import Word
from ddpdebug.printing import say

GOOD, BAD, SKIP = "good", "bad", "skip"
_EXIT = {GOOD: 0, BAD: 1, SKIP: 125}
_MAX_FINDINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked of every commit.

    Args:
        words: the words after `ddpdebug check`.
        prefix: the folder within the repository in which they run.
        code: the exit code of the bad end; None while it is not known.
        codes: its findings' codes; a commit is bad for sharing one.
    """

    words: Sequence[str]
    repeat: int
    folder: str
    prefix: str
    code: int | None = None
    codes: Sequence[str] = ()

    def against(self, found: Mapping[str, Any]) -> Plan:
        """Return the plan that looks for what was found at the bad end."""
        return replace(self, code=found["code"], codes=found["codes"])

    def to_json(self) -> str:
        """Return the plan as a file for the probes."""
        return json.dumps(asdict(self))

    def known(self) -> dict[str, dict[str, Any]]:
        """Return what the probes of each commit have found."""
        files = (Path(self.folder) / "found").glob("*.json")
        return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def probe(plan: Plan, tree: Path, commit: str) -> dict[str, Any]:
    """Check the commit that is checked out in `tree`, as often as the plan says, and keep what was found."""
    found = []
    for _ in range(plan.repeat):
        found.append(_check(plan, tree))
        answers = Counter(one["answer"] for one in found)
        if max(answers.values()) > plan.repeat // 2:
            break
    answer = GOOD if answers[GOOD] > answers[BAD] else BAD if answers[BAD] > answers[GOOD] else SKIP
    told = next((one for one in found if one["answer"] == answer), found[-1])
    record = {**told, "answer": answer, "verdict": ", ".join(one["verdict"] for one in found)}
    folder = Path(plan.folder) / "found"
    folder.mkdir(exist_ok=True)
    (folder / f"{commit}.json").write_text(json.dumps(record), encoding="utf-8")
    say(f"ddpdebug: bisect: {commit[:12]} {answer} ({record['verdict']})\n")
    return record


def _check(plan: Plan, tree: Path) -> dict[str, Any]:
    number = len(list(Path(plan.folder).glob("run-*")))
    run = Path(plan.folder) / f"run-{number}"
    run.mkdir()
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "GITHUB_"))}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a cache of one commit must not serve another
    cwd = tree / plan.prefix if (tree / plan.prefix).is_dir() else tree
    found = checked(run, plan.words, python=["-P"], cwd=cwd, env=environ)
    codes = [finding["code"] for finding in found.findings if finding["severity"] != "info"]
    lines = [_line(finding) for finding in found.findings[:_MAX_FINDINGS]]
    code = 0 if found.verdict == Word.UNCHECKED.value else found.code  # no finding; one process is enough here
    answer, verdict = _answer(plan, code, codes), found.verdict or "no verdict"
    return {"code": code, "codes": codes, "findings": lines, "answer": answer, "verdict": verdict}


def _answer(plan: Plan, code: int, codes: Sequence[str]) -> str:
    if code == 0:
        return GOOD
    if plan.code is None:
        return BAD
    if code != plan.code:
        return SKIP  # it does not get as far as the question
    return BAD if code != 1 or set(codes) & set(plan.codes) else GOOD  # another finding is not the one looked for


def _line(finding: Mapping[str, Any]) -> str:
    place = [] if finding.get("step") is None else [f"step {finding['step']}"]
    place += [f"ranks {', '.join(map(str, finding['ranks']))}"] if finding.get("ranks") else []
    subject = ", ".join(finding.get("subject", [])[:3])
    return " · ".join([f"{finding['code']} {finding['title']}", *place, *([subject] if subject else [])])


def main(argv: Sequence[str]) -> int:
    """Answer for the commit in this folder."""
    plan = Plan(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    tree = Path.cwd()
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"],  # noqa: S607 - as git itself is found
        capture_output=True,
        text=True,
        check=True,
    )
    return _EXIT[probe(plan, tree, head.stdout.strip())["answer"]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
