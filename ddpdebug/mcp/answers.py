"""What is answered about runs: JSON values of bounded size, made of what the readers of run directories return.

Texts of a run (names, messages, paths, stacks) stand in fields of JSON, as data, and are cut. Only what lies in the
given directories is read, also through links, and nothing is written. Torch-free.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ddpdebug.ci.json_junit import to_json
from ddpdebug.ci.publish import Witness, judge_directory
from ddpdebug.clock import utc_now
from ddpdebug.detectors.nature import restart
from ddpdebug.detectors.pages import pages
from ddpdebug.errors import UsageError, did_you_mean
from ddpdebug.facts.comparison import differences, facts_of, listed
from ddpdebug.progress.boxes import read_ranks, together
from ddpdebug.reports.reading import read_history
from ddpdebug.reports.top.snapshot import from_directory
from ddpdebug.run_directory.reader import CHECK, RUN, read_findings, read_run
from ddpdebug.schema.finding import Severity, strict

#: Bytes of an answer.
LIMIT = 20_000
#: By what an answer is cut until it fits: characters of a text, items of a list or an object.
_CUTS = ((4000, 400), (1000, 100), (400, 40), (200, 15), (100, 6), (60, 3))
_DEEP, _MAX_RUNS, _MAX_ENTRIES = 3, 50, 200_000
_FOLDER = "ddpdebug-runs"
_LOSS, _TIME = "loss median rank", "step"
_MAX_POINTS, _MAX_OUTPUT = 200, 4000
_MAX_RANKS, _MAX_STEPS, _MAX_SECONDS = 64, 100_000, 3600
#: Seconds that a check has beyond its own limit to end its ranks and to judge.
_GRACE = 120
#: What of `run.json` is another in each run.
_OF_ITS_OWN = frozenset({"run", "time", "outcome", "coverage", "waiting", "layout"})


def bounded(answer: Mapping[str, Any]) -> str:
    """Return an answer as JSON in ASCII of at most `LIMIT` bytes; what is cut is said in `shortened`."""
    value = strict(answer)
    text = json.dumps(value)
    for characters, items in _CUTS:
        if len(text) <= LIMIT:
            return text
        cut = _cut(value, characters, items)
        text = json.dumps({**cut, "shortened": f"texts to {characters} characters, lists to {items} items"})
    return text if len(text) <= LIMIT else json.dumps({"shortened": "the answer is too large; ask for less"})


def _cut(value: Any, characters: int, items: int) -> Any:
    if isinstance(value, str) and len(value) > characters:
        return value[: characters - 1] + "…"
    if isinstance(value, list):
        return [_cut(item, characters, items) for item in value[:items]]
    if isinstance(value, dict):
        return {k[:characters]: _cut(item, characters, items) for k, item in list(value.items())[: max(items, 12)]}
    return value


class Answers:
    """Answers about the runs in some directories.

    Args:
        roots: where runs, and scripts that may be checked, lie.

    Raises:
        UsageError: one of them is no directory.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                raise UsageError(f"there is no directory {str(root)!r}")
        self._roots = tuple(dict.fromkeys(root.resolve() for root in roots))

    # --- about runs ---------------------------------------------------------------------------------------------------

    def list_runs(self, most: int = 20) -> dict[str, Any]:
        """List the runs, the newest first: their names, by which other questions name them, and what they came to.

        Args:
            most: so many runs at most, up to 50.
        """
        found = sorted(self._runs(), key=lambda item: -item[1])
        shown = [self._about(path) for path, _ in found[: max(1, min(most, _MAX_RUNS))]]
        return {"runs": shown, "known": len(found)}

    def run_state(self, run: str) -> dict[str, Any]:
        """Say how a run stands: its verdict once it has ended, each rank's newest step, and who waits for whom.

        Args:
            run: the name of a run, as list_runs has it.
        """
        directory = self._run(run)
        known, now = read_run(directory), from_directory(directory)
        ended = isinstance(known.get("outcome"), dict) or (directory / CHECK).is_file()
        verdict: dict[str, Any] | None = None
        if ended:
            verdict = json.loads(to_json(judge_directory(directory, Witness.of(directory), "error"), run))
            for name in ("findings", "coverage", "run"):
                del verdict[name]
        ranks = [
            {
                "rank": view.rank,
                "step": view.step,
                "seconds_since_step": _number(view.age),
                "loss": _number(view.loss),
                "step_seconds": _number(view.step_seconds),
                "differs_in": list(view.outvoted),
                "ended": view.ended or None,
            }
            for view in now.ranks
        ]
        return {
            "run": run,
            "script": _script(known),
            "world": now.world,
            "ended": ended,
            "verdict": verdict,
            "ranks_differ_in": dict(now.differing),
            "waiting": now.waiting or None,
            "is_hang": now.hangs,
            "waits": list(now.waits),
            "not_checked": now.unchecked or None,
            "findings": [
                {"code": code, "severity": severity, "about": about} for code, severity, about in now.incidents
            ],
            "damage": list(now.damage),
            "ranks": ranks,
        }

    def findings(self, run: str, code: str = "", first: int = 0, most: int = 5) -> dict[str, Any]:
        """Return what was found in a run, oldest first: step, ranks, the user's line, evidence, causes, what to do.

        Args:
            run: the name of a run, as list_runs has it.
            code: findings of this code only.
            first: so many findings are passed over.
            most: so many findings at most, up to 20.
        """
        found = [finding for finding in read_findings(self._run(run)) if code.upper() in {"", finding.code}]
        shown = found[max(0, first) :][: max(1, min(most, 20))]
        known = pages()
        runbooks = {
            each: {name: known[each].prose[name] for name in ("meaning", "impact", "diagnosis")}
            for each in dict.fromkeys(finding.code for finding in shown)
            if each in known
        }
        told = [{**json.loads(finding.to_json()), "restart": restart(finding)} for finding in shown]
        return {"run": run, "known": len(found), "first": max(0, first), "findings": told, "runbooks": runbooks}

    def series(self, run: str, names: Sequence[str] = (_LOSS, _TIME), points: int = 40) -> dict[str, Any]:
        """Return numbers of a run over its steps as pairs of step and value, null where the value is not finite.

        Args:
            run: the name of a run, as list_runs has it.
            names: what is wanted; `available` in the answer lists what there is. Times are seconds.
            points: so many points of each at most, up to 200.
        """
        history = read_history(self._run(run))
        for name in names:
            if name not in history.series:
                raise UsageError(f"there is no series {name!r}; {did_you_mean(name, history.series)}")
        count = max(2, min(points, _MAX_POINTS))
        shown = {name: _thin([(s, _number(v)) for s, v in history.series[name]], count) for name in names}
        available = [name for name, values in history.series.items() if values]
        span = [history.first, history.last]
        return {"run": run, "steps": history.steps, "span": span, "series": shown, "available": available}

    def stacks(self, run: str) -> dict[str, Any]:
        """Say where the ranks of a run on this machine are, or were last: ranks in the same place together.

        Args:
            run: the name of a run, as list_runs has it.
        """
        directory = self._run(run)
        world = read_run(directory).get("world") or 1
        states = read_ranks(directory, world)
        groups = [
            {"ranks": list(one.ranks), "state": one.state, "does": one.words, "stack": list(one.stack)}
            for one in together(states)
        ]
        unknown = [rank for rank in range(min(world, 4096)) if rank not in states]
        return {"run": run, "groups": groups, "ranks_without_a_black_box": unknown}

    def explain(self, code: str) -> dict[str, Any]:
        """Return the runbook of a finding code: meaning, impact, diagnosis, causes, remedy.

        Args:
            code: for example RANK101.
        """
        known = pages()
        page = known.get(code.upper())
        if page is None:
            raise UsageError(f"unknown code {code[:40]!r}; {did_you_mean(code.upper(), known)}")
        about = {"code": page.code, "severity": page.severity.label, "title": page.title}
        return {**about, "is_detected": page.detected, "found_by": page.found_by or None, **page.prose}

    def facts(self, run: str) -> dict[str, Any]:
        """Return what is known of how a run trains: who moves, modes, loads, samples, scale, order, numbers, ranks.

        Args:
            run: the name of a run, as list_runs has it.
        """
        known = facts_of(self._run(run))
        return {"run": run, "world": known.world, "steps": known.steps, "facts": list(listed(known))}

    def compare_runs(self, one: str, other: str) -> dict[str, Any]:
        """Return in what two runs differ: facts, settings and versions, findings, verdicts, losses, times of a step.

        Args:
            one: the name of a run, as list_runs has it.
            other: the name of another one.
        """
        paths = {"one": self._run(one), "other": self._run(other)}
        flat = {who: dict(_flat(read_run(path))) for who, path in paths.items()}
        missing = object()
        settings = {
            name: {who: flat[who].get(name) for who in paths}
            for name in sorted(flat["one"].keys() | flat["other"].keys())
            if flat["one"].get(name, missing) != flat["other"].get(name, missing)
        }
        histories = {who: read_history(path) for who, path in paths.items()}
        codes = {who: {finding.code for finding in found.findings} for who, found in histories.items()}
        losses = {
            who: {step: value for step, value in found.series[_LOSS] if math.isfinite(value)}
            for who, found in histories.items()
        }
        shared = [step for step in losses["one"] if step in losses["other"]]
        apart = next((step for step in shared if losses["one"][step] != losses["other"][step]), None)
        at = sorted({step for step in (apart, *shared[-1:]) if step is not None})
        return {
            "one": {**self._about(paths["one"]), "step_seconds": _middle(histories["one"].series[_TIME])},
            "other": {**self._about(paths["other"]), "step_seconds": _middle(histories["other"].series[_TIME])},
            "facts_that_differ": _differences(paths["one"], paths["other"]),
            "differ_in": settings,
            "findings_of_one_alone": sorted(codes["one"] - codes["other"]),
            "findings_of_the_other_alone": sorted(codes["other"] - codes["one"]),
            "findings_of_both": sorted(codes["one"] & codes["other"]),
            "first_step_with_another_loss": apart,
            "losses": {str(step): {who: losses[who][step] for who in paths} for step in at},
        }

    # --- what is run --------------------------------------------------------------------------------------------------

    def check(
        self, script: str, args: Sequence[str] = (), nproc_per_node: int = 2, steps: int = 20, timeout: int = 600
    ) -> dict[str, Any]:
        """Run a training script for a few steps on several ranks of this machine, and return the verdict.

        Args:
            script: a file of Python in one of the directories that are served.
            args: its arguments.
            nproc_per_node: ranks, up to 64.
            steps: optimizer steps after which it is stopped.
            timeout: seconds after which it counts as a hang, up to 3600.
        """
        path, root = self._inside(script)
        if not path.is_file() or path.suffix != ".py":
            raise UsageError(f"{script[:200]!r} is no file of Python")
        limits = {"nproc-per-node": _MAX_RANKS, "steps": _MAX_STEPS, "timeout": _MAX_SECONDS}
        given = dict(zip(limits, (nproc_per_node, steps, timeout), strict=True))
        for name, value in given.items():
            if not 1 <= value <= limits[name]:
                raise UsageError(f"{name} is from 1 to {limits[name]}")
        out = root / _FOLDER / f"{utc_now():%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        words = [f"--{name}={value}" for name, value in given.items()]
        words = ["check", *words, f"--out={out}", "--metrics=off", "--quiet", str(path), *args]
        done = _run(words, root, timeout + _GRACE)
        run = out.relative_to(root).as_posix()
        state = self.run_state(run) if (out / RUN).is_file() else {}
        return {**done, **state, "run": run}

    def replay(self, bundle: str, script: str, timeout: int = 300) -> dict[str, Any]:
        """Run a step with a non-finite value again from its bundle, in one process, and name the first bad operation.

        Args:
            bundle: the bundle's directory, as the evidence of a finding names it, in the directories that are served.
            script: the file of Python, there too, that has the model's class.
            timeout: seconds after which it is ended, up to 3600.
        """
        (step, root), (path, _) = self._inside(bundle), self._inside(script)
        if not path.is_file() or path.suffix != ".py":
            raise UsageError(f"{script[:200]!r} is no file of Python")
        if not 1 <= timeout <= _MAX_SECONDS:
            raise UsageError(f"timeout is from 1 to {_MAX_SECONDS}")
        with tempfile.TemporaryDirectory() as scratch:
            found = Path(scratch) / "result.json"
            done = _run(["replay", f"--script={path}", f"--json={found}", str(step)], root, timeout)
            return {**done, "result": json.loads(found.read_text(encoding="utf-8")) if found.is_file() else None}

    # --- where things lie ---------------------------------------------------------------------------------------------

    def _inside(self, name: str) -> tuple[Path, Path]:
        """Return what a name means in one of the roots, with all links resolved, and that root."""
        if name and "\0" not in name and len(name) < 4096:
            for root in self._roots:
                with suppress(OSError, RuntimeError):
                    path = (root / name).resolve(strict=True)
                    if path.is_relative_to(root):
                        return path, root
        raise UsageError(f"there is no {name[:200]!r} in the directories that are served")

    def _run(self, name: str) -> Path:
        directory, root = self._inside(name)
        if not directory.is_dir():
            raise UsageError(f"{name[:200]!r} is no run directory; list_runs names them")
        for count, entry in enumerate(_entries(directory)):
            if count >= _MAX_ENTRIES:
                raise UsageError(f"{name[:200]!r} has too many files")
            if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
                raise UsageError(f"{name[:200]!r} has a link that leads out of the directories that are served")
        read_run(directory)
        return directory

    def _runs(self) -> Iterator[tuple[Path, float]]:
        seen = set[Path]()
        for root in self._roots:
            for depth in range(_DEEP + 1):
                for file in root.glob("/".join(["*"] * depth + [RUN])):
                    directory = file.parent.resolve()
                    if directory not in seen and directory.is_relative_to(root):
                        seen.add(directory)
                        with suppress(OSError):
                            yield directory, file.stat().st_mtime

    def _about(self, directory: Path) -> dict[str, Any]:
        root = next(root for root in self._roots if directory.is_relative_to(root))
        about: dict[str, Any] = {"run": directory.relative_to(root).as_posix()}
        try:
            directory = self._run(about["run"])
            known, found = read_run(directory), read_findings(directory)
        except (OSError, ValueError, UsageError) as error:
            return {**about, "unreadable": str(error)}
        gravest = max(found, key=lambda finding: finding.severity, default=None)
        outcome = known.get("outcome")
        return {
            **about,
            "id": known["run"],
            "started": known.get("time"),
            "script": _script(known),
            "world": known.get("world"),
            "outcome": outcome.get("reason") if isinstance(outcome, dict) else None,
            "findings": len(found),
            "gravest": None if gravest is None or gravest.severity <= Severity.INFO else gravest.code,
        }


def _run(words: Sequence[str], cwd: Path, seconds: float) -> dict[str, Any]:
    """Run ddpdebug in a process group of its own, and end that where it takes too long.

    Returns:
        Its exit code, and the end of what it has printed.
    """
    with tempfile.TemporaryFile() as output:
        try:
            code = _exit_code(words, cwd, output, seconds)
        except subprocess.TimeoutExpired:
            raise UsageError(f"ddpdebug {words[0]} took longer than {seconds} s and was ended") from None
        output.seek(max(0, output.tell() - _MAX_OUTPUT))
        return {"exit_code": code, "output_ends_with": output.read().decode("utf-8", "replace")}


def _exit_code(words: Sequence[str], cwd: Path, output: IO[bytes], seconds: float) -> int:
    env = {name: value for name, value in os.environ.items() if name != "DDPDEBUG_MCP_TOKEN"}
    with subprocess.Popen(  # noqa: S603 - our own command, whose script who has started the server lets run
        [sys.executable, "-m", "ddpdebug", *words],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            output.seek(0, os.SEEK_END)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a directory, links unfollowed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))


def _differences(one: Path, other: Path) -> list[str]:
    """Return in words what is said otherwise of two runs; nothing where one of them has no steps."""
    try:
        return [difference.words for difference in differences(facts_of(one), facts_of(other))]
    except UsageError as error:
        return [f"not known: {error}"]


def _script(known: Mapping[str, Any]) -> str | None:
    words = known.get("command")
    return str(words[0]) if isinstance(words, list) and words else None


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if not prefix and name in _OF_ITS_OWN:
            continue
        if isinstance(item, dict) and item:
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _middle(points: Sequence[tuple[int, float]]) -> float | None:
    known = sorted(value for _, value in points if math.isfinite(value))
    return known[len(known) // 2] if known else None


def _thin(points: Sequence[Any], most: int) -> list[Any]:
    """Return evenly spaced points, among them the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
