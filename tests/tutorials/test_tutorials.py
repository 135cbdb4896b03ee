"""Tutorials and the page of trainers, followed word for word: files are written, commands run, and this is what comes.

A page has three kinds of blocks: a file behind `<!-- file: train.py -->`, a diff behind `<!-- change: train.py -->`,
and ```console, whose lines `$ ...` are run in one directory. What is shown below a command must come in that order;
times, numbers that depend on the machine, ids, ports and paths may differ, and `...` stands for any lines, or the
rest of one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = [*TUTORIALS, DOCS / "trainers.md"]

_BLOCK = re.compile(r"(?:^<!-- (file|change): (\S+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What differs from one run to the next, and what stands in its place.
_VARIES = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\b\d{8}T\d{6}Z-[0-9a-f]{6}\b"), "RUN"),
    (re.compile(r"\brun [0-9a-f]{6}\b"), "run ID"),
    (re.compile(r"127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"(?<![\w.])/[\w./~-]*/"), "DIR/"),
    (re.compile(r"\b\d+(\.\d+)? (seconds|s|ms|%)(?=\W|$)"), "TIME"),
    (re.compile(r"\b[0-9a-f]{16}\b"), "DIGEST"),
    (re.compile(r"#\d+"), "#N"),
    (re.compile(r"(?<!step )(?<!steps )-?\d+\.\d+(e[+-]?\d+)?"), "NUMBER"),
)


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    kind: str
    file: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks that are followed."""
    found = _BLOCK.findall(page.read_text("utf-8"))
    return [Block(what or language, file, text) for what, file, language, text in found]


def plain(line: str) -> str:
    """Return a line without what differs between runs."""
    for pattern, instead in _VARIES:
        line = pattern.sub(instead, line)
    return " ".join(line.split())


def alike(shown: str, real: str) -> bool:
    """Return whether a line is as shown; `...` at its end stands for the rest."""
    wanted, found = plain(shown), plain(real)
    return found.startswith(wanted[:-3].rstrip()) if wanted.endswith("...") else found == wanted


def missing(shown: list[str], real: list[str]) -> str | None:
    """Return the first shown line that does not come, in order; without `...` between them, lines follow each other."""
    place, anywhere = 0, True
    for line in shown:
        if line.strip() == "...":
            anywhere = True
            continue
        rest = real[place:] if anywhere else real[place : place + 1]
        where = next((n for n, other in enumerate(rest) if alike(line, other)), None)
        if where is None:
            return line
        place, anywhere = place + where + 1, False
    return None


def change(text: str, diff: str) -> str:
    """Return a file's text with each `-` line, or run of them, replaced by the `+` lines that follow."""
    for old, new in re.findall(r"((?:^[ -].*\n)+)?((?:^\+.*\n)*)", diff, re.MULTILINE):
        if not old and not new:
            continue
        before = "".join(line[1:] for line in old.splitlines(keepends=True))
        kept = "".join(line[1:] for line in old.splitlines(keepends=True) if line[0] == " ")
        assert text.count(before) == 1, before
        text = text.replace(before, kept + "".join(line[1:] for line in new.splitlines(keepends=True)))
    return text


def _said(output: str) -> list[str]:
    """Return what a terminal shows but for the launcher's own warning about threads."""
    return [line for line in output.splitlines() if line.strip() and not re.match(r"W\d{4} ", line)]


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_is_true(page: Path, tmp_path: Path) -> None:
    """From an empty directory to the mended script."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ran = 0
    for block in blocks(page):
        if block.kind == "file":
            (tmp_path / block.file).write_text(block.text, "utf-8")
        elif block.kind == "change":
            path = tmp_path / block.file
            path.write_text(change(path.read_text("utf-8"), block.text), "utf-8")
        elif block.kind == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                done = subprocess.run(
                    ["bash", "-c", command],
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=False,
                )
                ran += 1
                real = _said(done.stdout)
                wrong = missing(_said(shown), real)
                assert wrong is None, f"$ {command}\ndoes not print\n{wrong}\nbut\n" + "\n".join(real)
    assert ran >= 3


def test_there_is_one_for_each_kind_of_user() -> None:
    """The six of the index."""
    assert {page.stem for page in TUTORIALS} == {
        "loss-is-nan",
        "ranks-diverge",
        "fsdp-is-wrong",
        "job-hangs",
        "cluster",
        "ci",
    }


def test_what_does_not_come_is_seen() -> None:
    """A line that is not there, one that comes too early, and one that does not follow."""
    real = ["one 1.5", "two", "three"]
    assert missing(["one 2.5", "two"], real) is None
    assert missing(["one 2.5", "...", "three"], real) is None
    assert missing(["one 2.5", "three"], real) == "three"
    assert missing(["two", "...", "one 1.5"], real) == "one 1.5"
    assert missing(["four"], real) == "four"
    assert missing(["one 2.5", "tw..."], real) is None
    assert change("a\nb\nc\n", " a\n-b\n+d\n+e\n") == "a\nd\ne\nc\n"
