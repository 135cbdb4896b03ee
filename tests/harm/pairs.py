"""Runs situations in pairs, plain and under `ddpdebug run`, and says what differs.

    python tests/harm/pairs.py                         # all of `situations/`, a line each
    python tests/harm/pairs.py --twice signal          # those with "signal" in their file name, plain against plain
    python tests/harm/pairs.py --write docs/harm.md    # all, and write what was seen into the list of the page
    python tests/harm/pairs.py --tree exit             # the ranks talk and are judged as very many are (decision 33)

A situation is one script. The first line of its docstring names it; lines `key: value` below say how it is run:

- "run": "forked" from a process that has loaded torch (cheap, the default), "alone" in a fresh interpreter, "torchrun"
- "ranks": number of processes; with "alone" the variables of a rank are set only where it is given
- "python": flags of the interpreter; "env": variables; "torchrun": options of the launcher
- "command": with its first options, where it is attached by another one than `run`
- "under": a shell line around the command, which is "$@"
- "slow": "yes" where a run takes more than a few seconds; what is not forked is slow anyway
- "watched": "no" where ddpdebug cannot see a step
- "parts": "all" where no part of ddpdebug may switch itself off
- "needs": "root"
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "support"))
from machine import free_port  # noqa: E402
from many_ranks import SAID as OVER_A_TREE  # noqa: E402

ROOT = HERE.parent.parent
FOLDER = HERE / "situations"
#: On PYTHONPATH it makes few ranks very many.
_TREE = HERE.parent / "support" / "over_a_tree"
_KEYS = {"run", "ranks", "python", "env", "torchrun", "under", "slow", "watched", "parts", "needs", "command"}
#: A run that takes longer does not end.
_SECONDS = 300

Result = dict[str, Any]


@dataclass(frozen=True)
class Situation:
    """One script and how it is run."""

    path: Path
    name: str
    options: dict[str, str]

    @property
    def how(self) -> str:
        return self.options.get("run", "forked")

    @property
    def ranks(self) -> int:
        return int(self.options.get("ranks", "1"))

    @property
    def watched(self) -> bool:
        return not self.options.get("watched", "yes").startswith("no")

    @property
    def slow(self) -> bool:
        return self.how != "forked" or "slow" in self.options

    @property
    def group(self) -> str:
        """The first word of the file's name."""
        return self.path.stem.partition("_")[0]

    @cached_property
    def env(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.options.get("env", "").split())

    @property
    def skipped(self) -> str | None:
        """Why it cannot be run here."""
        return "needs root" if self.options.get("needs") == "root" and os.geteuid() != 0 else None


def read(path: Path) -> Situation:
    """Read how a script wants to be run from its docstring."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    name, *rest = text.splitlines() or [path.stem]
    pairs = (line.split(": ", 1) for line in rest if re.match(r"[a-z]+: ", line))
    options = dict(pairs)
    if unknown := options.keys() - _KEYS:
        raise ValueError(f"{path.name}: unknown keys {sorted(unknown)}")
    return Situation(path, name.strip().rstrip("."), options)


def situations() -> list[Situation]:
    """Return all of them, by file name."""
    return [read(path) for path in sorted(FOLDER.glob("[a-z]*.py"))]


def _environment(situation: Situation, *, tree: bool = False) -> dict[str, str]:
    taken = ("DDPDEBUG_", "PYTEST_", "PYTHON", "RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(taken)}
    kept.update(PYTHONPATH=f"{ROOT}:{_TREE}" if tree else str(ROOT), OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    if situation.how == "alone" and "ranks" in situation.options:
        kept.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    kept.update(situation.env)
    return {key: value for key, value in kept.items() if value != "-"}


def _words(situation: Situation, options: list[str] | None) -> list[str]:
    script = str(situation.path)
    python = [sys.executable, *situation.options.get("python", "").split()]
    run = [] if options is None else ["-m", "ddpdebug", *situation.options.get("command", "run").split(), *options]
    if situation.how == "torchrun":
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={situation.ranks}"]
        launch += ["--standalone", *situation.options.get("torchrun", "").split()]
        words = [*python, *launch, *run, script]
    else:
        words = [*python, *run, script]
    under = situation.options.get("under")
    return words if under is None else ["bash", "-c", under, "bash", *words]


def run_fresh(situation: Situation, options: list[str] | None, cwd: Path, *, tree: bool = False) -> list[Result]:
    started = time.monotonic()
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        subprocess.Popen(
            _words(situation, options),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=_environment(situation, tree=tree),
            start_new_session=True,
        ) as process,
    ):
        status: int | None
        try:
            status = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.monotonic() - started
        left = _ended(process.pid)
        process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
    return [{"status": status, "out": texts[0], "err": texts[1], "seconds": seconds, "left": left}]


def _ended(group: int) -> bool:
    """End what is left of a process group, and tell whether there was something."""
    deadline = time.monotonic() + 20
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            return True
        time.sleep(0.05)


def _files(cwd: Path) -> list[str]:
    """Name the files that the script itself left, with their sizes."""
    found = []
    if not cwd.is_dir():
        return ["the folder is gone"]
    for path in sorted(cwd.rglob("*")):
        inside = path.relative_to(cwd)
        if inside.parts[0] != "ddpdebug-runs" and path.is_file() and not path.is_symlink():
            found.append(f"{inside} {path.stat().st_size}")
    return found


def _steps(cwd: Path) -> int:
    """Count the steps that were seen: what the run directories say of their ends, or the rows in them."""
    seen = 0
    for run in cwd.rglob("ddpdebug-runs/*/run.json"):
        steps = (json.loads(run.read_text()).get("outcome") or {}).get("steps") or {}
        rows = run.parent / "steps.bin"
        seen += max(steps.values(), default=0) or int(rows.exists() and rows.stat().st_size > 0)
    return seen


@dataclass
class Pair:
    """The two runs of a situation."""

    situation: Situation
    plain: list[Result] = field(default_factory=list)
    attached: list[Result] = field(default_factory=list)
    files: tuple[list[str], list[str]] = ([], [])
    steps: int = 0
    folder: str = ""
    tree: bool = False

    @property
    def differences(self) -> list[str]:
        """What a user could tell the two apart by."""
        found = []
        for rank, (a, b) in enumerate(zip(self.plain, self.attached, strict=True)):
            found += [f"rank {rank}: {text}" if len(self.plain) > 1 else text for text in self._of_rank(a, b)]
        if self.files[0] != self.files[1]:
            found.append(f"files: {self.files[0]} became {self.files[1]}")
        if self.situation.watched and not self.steps and not found:
            found.append("no step was watched: the comparison means nothing")
        talk = self.tree and self.situation.watched and self.situation.ranks > 1 and not found
        if talk and not any(OVER_A_TREE in result["err"] for result in self.attached):
            found.append("the ranks did not talk over a tree")
        if self.situation.options.get("parts") == "all" and self.said:
            found.append(f"switched off: {', '.join(self.said)}")
        return found

    @property
    def errors(self) -> str:
        """What the ranks have written to their standard errors."""
        sides = {"plain": self.plain, "attached": self.attached}
        texts = {f"{side}, rank {i}": r["err"] for side, results in sides.items() for i, r in enumerate(results)}
        return "\n".join(f"{whose}:\n{text[-4000:]}" for whose, text in texts.items())

    def _of_rank(self, a: Result, b: Result) -> list[str]:
        found = []
        if a["status"] != b["status"]:
            found.append(f"{ending(a['status'])} became {ending(b['status'])}")
        ours, theirs = (_output(r["out"], self.situation) for r in (a, b))
        found += _lines("output", ours, theirs)
        for x, y in zip(_measured(a["out"]), _measured(b["out"]), strict=False):
            if y[1] > x[1] + x[2]:
                found.append(f"{x[0]} {x[1]} became {y[1]}, allowed are {x[2]} more")
        found += _lines("stderr", *(_errors(r["err"], self.situation, self.folder) for r in (a, b)))
        if b["left"] and not a["left"]:
            found.append("a process outlived it")
        return found

    @property
    def said(self) -> list[str]:
        """Which parts of ddpdebug said that they have switched themselves off."""
        text = "\n".join(r["err"] for r in self.attached)
        return sorted(set(re.findall(r"ddpdebug: (\S+)(?: of rank \d+)? has switched itself off", text)))


def ending(status: int | None) -> str:
    """Say how a process ended."""
    if status is None:
        return "no end"
    if status < 0:
        return signal.Signals(-status).name
    return f"exit {status}"


def _lines(what: str, a: list[str], b: list[str]) -> list[str]:
    if a == b:
        return []
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
    if pairs:
        return [f"{what} {pairs[0][0][:300]!r} became {pairs[0][1][:300]!r}"]
    more, word = (a, "lost") if len(a) > len(b) else (b, "gained")
    return [f"{what} {word} {more[min(len(a), len(b))][:300]!r}"]


def _output(text: str, situation: Situation) -> list[str]:
    lines = [line for line in text.splitlines() if not line.startswith("~ ")]
    return sorted(lines) if situation.how == "torchrun" else lines


def _measured(text: str) -> list[tuple[str, int, int]]:
    found = []
    for line in text.splitlines():
        if line.startswith("~ "):
            *name, value, more = line[2:].split()
            found.append((" ".join(name), int(value), int(more)))
    return found


#: Lines of the launcher, of gloo and of torch's teardown: they carry times and ports, or come now and then. The last
#: ones stand below a store's warning.
_NOISE = re.compile(
    r"^(\[?[WEIF]\d{4} |\*+$|Setting OMP_NUM|\[Gloo\]|\[rank\d\]:\[?[WEI]|terminate called|\[W\d"
    r"|USDT:|.*SyncActivityProfiler|=====|-----|\s*$"
    r"|Exception raised from \w+ at .*\(most recent call first\):$|frame #\d+: |<omitting python frames>$)"
)
#: The last one is Lightning's.
_OURS = re.compile(r"^(\[rank\d\]: )?(ddpdebug|Adding 1 callbacks from entry point 'ddpdebug')")
_OURS_MORE = re.compile(
    r"^  (where|what|missing|calls|waits|so far|stacks|evidence|over|perhaps|next|note|not checked|run directory|\s{6})"
)
_FRAME = re.compile(r'^(\[rank\d\]: )?  File "(.*?)"')
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}|pid[ =:]*\d+|[Pp]rocess \d+|\b\d\d-\d\d \d\d:\d\d:\d\d\b|\b\d{4,5}\b")


def _errors(text: str, situation: Situation, folder: str) -> list[str]:
    """Return what the script and torch said: without our messages, our frames and what differs in any two runs."""
    found: list[str] = []
    ours = frame = False
    for line in text.splitlines():
        ours = bool(_OURS.match(line)) or (ours and bool(_OURS_MORE.match(line)))
        if place := _FRAME.match(line):
            parts = Path(place[2]).parts
            frame = "zygote.py" in parts or "ddpdebug" in parts or "runpy" in place[2]
            frame = frame or place[2].startswith(f"{ROOT}/ddpdebug/")
        elif not line.startswith("    "):
            frame = False
        if ours or frame or _NOISE.match(line):
            continue
        short = re.sub(rf"{re.escape(folder)}/(plain|attached)", "CWD", line).replace(f"{ROOT}/", "")
        found.append(_ADDRESS.sub("#", short))
    if situation.how == "torchrun":  # the launcher's report is full of times; the ranks' lines mix
        found = sorted(line for line in found if re.search(r"(?<!Child)(Warning|Error|Exception)\b", line))
    return found


def _forked_jobs(
    chosen: list[Situation], folder: Path, *, twice: bool, tree: bool, options: list[str]
) -> list[dict[str, Any]]:
    jobs = []
    for situation in chosen:
        for mode in ("plain", "attached"):
            cwd = folder / situation.path.stem / mode
            cwd.mkdir(parents=True)
            jobs.append(
                {
                    "script": str(situation.path),
                    "args": [],
                    "ranks": situation.ranks,
                    "cwd": str(cwd),
                    "timeout": _SECONDS,
                    "env": {**situation.env, "PYTHONPATH": f"{FOLDER}:{_TREE}" if tree else str(FOLDER)},
                    "options": None if mode == "plain" or twice else options,
                }
            )
    return jobs


def _run_forked(chosen: list[Situation], folder: Path, *, twice: bool, tree: bool, options: list[str]) -> list[Pair]:
    """Run situations one after the other, each forked from one process that has loaded torch."""
    if not chosen:
        return []
    jobs = _forked_jobs(chosen, folder, twice=twice, tree=tree, options=options)
    name = chosen[0].path.stem
    (folder / f"{name}.jobs").write_text(json.dumps(jobs))
    words = [
        sys.executable,
        str(HERE.parent / "support" / "zygote.py"),
        str(folder / f"{name}.jobs"),
        str(folder / f"{name}.done"),
    ]
    subprocess.run(words, check=True, env=_environment(chosen[0], tree=tree), stdin=subprocess.DEVNULL)
    done = iter(json.loads((folder / f"{name}.done").read_text()))
    pairs = []
    for situation in chosen:
        cwd = folder / situation.path.stem
        pair = Pair(situation, next(done), next(done), folder=str(cwd), tree=tree)
        pairs.append(_looked_at(pair))
    return pairs


def _looked_at(pair: Pair) -> Pair:
    plain, attached = Path(pair.folder, "plain"), Path(pair.folder, "attached")
    pair.files = _files(plain), _files(attached)
    pair.steps = _steps(attached)
    shutil.rmtree(pair.folder, ignore_errors=True)
    return pair


def _run_alone(situation: Situation, folder: Path, *, twice: bool, tree: bool, options: list[str]) -> Pair:
    cwd = folder / situation.path.stem
    for mode in ("plain", "attached"):
        (cwd / mode).mkdir(parents=True)
    plain = run_fresh(situation, None, cwd / "plain", tree=tree)
    attached = run_fresh(situation, None if twice else options, cwd / "attached", tree=tree)
    return _looked_at(Pair(situation, plain, attached, folder=str(cwd), tree=tree))


def run(
    chosen: Iterable[Situation], *, twice: bool = False, tree: bool = False, options: Iterable[str] = ()
) -> dict[str, Pair]:
    """Run situations in pairs, two at a time, and return them by the names of their files.

    Args:
        twice: run plain against plain, to see whether a situation is the same every time.
        tree: let the ranks talk and be judged as very many do.
        options: further options of `ddpdebug run`.
    """
    chosen = [situation for situation in chosen if situation.skipped is None]
    forked = [situation for situation in chosen if situation.how == "forked"]
    more: dict[str, Any] = {"twice": twice, "tree": tree, "options": list(options)}
    folder = Path(tempfile.mkdtemp(prefix="pairs"))
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            size = max(8, -(-len(forked) // 2))  # each part has a process of its own, which loads torch
            parts = [forked[i : i + size] for i in range(0, len(forked), size)]
            waiting = [pool.submit(_run_forked, part, folder, **more) for part in parts]
            alone = [pool.submit(_run_alone, s, folder, **more) for s in chosen if s.how != "forked"]
            pairs = [pair for future in waiting for pair in future.result()] + [f.result() for f in alone]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {pair.situation.path.stem: pair for pair in pairs}


_BEGIN, _END = "<!-- situations -->\n", "<!-- end of situations -->\n"
#: Of file names -> of the page.
_GROUPS = {
    "input": "Batches",
    "container": "Containers of batches",
    "mode": "Modes of torch",
    "subclass": "Tensor subclasses",
    "sharded": "Sharded training",
    "module": "Modules",
    "compile": "Compiled models",
    "replay": "Forwards that have made a NaN",
    "optimizer": "Optimizers",
    "warning": "Warnings",
    "memory": "Memory",
    "signal": "Signals and exceptions from outside",
    "exit": "Ends",
    "thread": "Threads",
    "process": "Processes",
    "limit": "Limits",
    "disk": "Disks and directories",
    "stream": "Streams",
    "port": "Ports",
    "hub": "The hub",
    "environment": "Environment",
    "launch": "Ways to launch",
    "python": "The interpreter",
    "version": "Versions",
    "unwatched": "Steps that are not watched",
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("\n", " ")


def _plainly(pair: Pair) -> str:
    ends = [ending(r["status"]) for r in pair.plain]
    if len(set(ends)) == 1:
        return ends[0] if len(ends) == 1 else f"{ends[0]} on {len(ends)} ranks"
    return ", ".join(f"rank {rank} {end}" for rank, end in enumerate(ends))


#: Between a situation's name and what is worth a word about it.
_DOT = " · "


def row(situation: Situation, pair: Pair | None) -> str:
    """Return a line of the page's list: how it ends plain, unless with 0, and attached, unless the same."""
    if pair is None:
        return f"- {_cell(situation.name)}{_DOT}not run: {situation.skipped}"
    parts = [] if all(r["status"] == 0 for r in pair.plain) else [_plainly(pair)]
    if pair.differences:
        parts.append(f"**differs**: {pair.differences[0][:160]}")
    else:
        parts += [f"switched itself off: {', '.join(pair.said)}"] if pair.said else []
        parts += [] if pair.steps else ["nothing watched"]
    return f"- {_cell(situation.name)}" + "".join(f"{_DOT}{_cell(part)}" for part in parts)


def table(chosen: Iterable[Situation], pairs: dict[str, Pair], known: Mapping[str, str] | None = None) -> str:
    """Return what was seen as Markdown, by groups, with the `known` lines of situations that were not chosen."""
    parts, chosen = [], [s.path for s in chosen]
    for group, title in _GROUPS.items():
        found = [
            row(s, pairs.get(s.path.stem)) if s.path in chosen else (known or {}).get(_cell(s.name))
            for s in situations()
            if s.group == group
        ]
        rows = [line for line in found if line is not None]
        if rows:
            parts.append("\n".join([f"### {title}\n", *rows, ""]))
    return "\n".join(parts)


def write(page: Path, text: str) -> None:
    """Put a new list into the page."""
    old = page.read_text("utf-8")
    before, after = old.partition(_BEGIN)[0], old.partition(_END)[2]
    page.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}", "utf-8")


def rows_on(page: Path) -> dict[str, str]:
    """Return the lines of the page's list by the name that each begins with."""
    inside = page.read_text("utf-8").partition(_BEGIN)[2].partition(_END)[0]
    return {line.split(_DOT)[0][2:]: line for line in inside.splitlines() if line.startswith("- ")}


def names_on(page: Path) -> list[str]:
    """Return the situations that the page lists."""
    return [cell.replace("\\<", "<") for cell in rows_on(page)]


def main() -> None:
    """Run what the command line chooses."""
    parser = argparse.ArgumentParser(description="Run situations in pairs.")
    parser.add_argument("names", nargs="*", help="parts of file names")
    parser.add_argument("--twice", action="store_true", help="plain against plain")
    parser.add_argument("--tree", action="store_true", help="the ranks talk over the tree, as very many do")
    parser.add_argument("--option", action="append", default=[], help="an option for ddpdebug run")
    parser.add_argument("--verbose", action="store_true", help="show the outputs")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write what was seen into the list of this page")
    args = parser.parse_args()
    names = args.names or [""]
    chosen = [s for s in situations() if any(name in s.path.stem for name in names)]
    failed = 0
    if args.tree and (args.twice or args.write):
        parser.error("--tree is for attached ranks, and the page tells of few")
    pairs = run(chosen, twice=args.twice, tree=args.tree, options=args.option)
    if args.write:
        write(args.write, table(chosen, pairs, rows_on(args.write)))
    for name, pair in sorted(pairs.items()):
        differences = pair.differences if not args.twice else [d for d in pair.differences if "watched" not in d]
        failed += bool(differences)
        plain = ", ".join(ending(r["status"]) for r in pair.plain)
        seconds = " + ".join(f"{r[0]['seconds']:.1f}" for r in (pair.plain, pair.attached))
        words = f"{plain:10} {pair.steps:4} steps {seconds:12} s {' '.join(pair.said)}"
        print(f"{'FAIL' if differences else 'ok  '} {name:40} {words}")
        for text in differences:
            print(f"       {text}")
        if args.verbose or any(r["status"] is None for r in pair.plain):
            for mode in ("plain", "attached"):
                for result in getattr(pair, mode):
                    print(f"----- {mode}\n{result['out']}\n-----\n{result['err'][-6000:]}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
