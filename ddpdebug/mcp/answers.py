"""Answers about runs: JSON values of bounded size, made from the readers of run directories.

Texts of a run (names, messages, paths, stacks) stand in fields of JSON, as data, and are cut. Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from ddpdebug.ci.json_junit import to_json
from ddpdebug.ci.publish import Witness, judge_directory
from ddpdebug.detectors.nature import restart
from ddpdebug.detectors.pages import pages
from ddpdebug.errors import UsageError, did_you_mean
from ddpdebug.facts.comparison import differences, facts_of, listed
from ddpdebug.progress.boxes import read_ranks, together
from ddpdebug.reports.reading import read_history
from ddpdebug.reports.top.snapshot import from_directory
from ddpdebug.run_directory.reader import CHECK, RANKS, STACKS, read_findings, read_run
from ddpdebug.schema.finding import Severity, strict

#: Bytes of an answer.
LIMIT = 20_000
#: By what an answer is cut until it fits: characters of a text, items of a list or an object.
_CUTS = ((4000, 400), (1000, 100), (400, 40), (200, 15), (100, 6), (60, 3))
_MAX_RUNS = 50
_LOSS, _TIME = "loss median rank", "step"
_MAX_POINTS, _MAX_RANKS, _MAX_STACKS = 200, 4096, 4000
#: What of `run.json` is another in each run.
_OF_ITS_OWN = frozenset({"run", "time", "outcome", "coverage", "waiting", "layout"})


def bounded(answer: Mapping[str, Any]) -> str:
    """Return an answer as JSON in ASCII of at most `LIMIT` bytes; `shortened` names what was cut."""
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


class Runs(Protocol):
    """A source of runs: their names, directories and states."""

    def newest(self, most: int) -> tuple[Sequence[str], int]:
        """Return the names of the newest runs, and the number of all runs."""

    def opened(self, name: str, *, brief: bool = False) -> AbstractContextManager[Path]:
        """Return a context with a run's directory, possibly a temporary one, for reading only.

        Args:
            brief: no more than `run.json` and findings is needed.

        Raises:
            UsageError: there is no such run, or it may not be read.
        """

    def known(self, name: str) -> Mapping[str, Any]:
        """Return facts about a run that are not in its directory."""


class Answers:
    """Answers about runs.

    Args:
        runs: where they are.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def list_runs(self, most: int = 20) -> dict[str, Any]:
        """List the runs, the newest first: their names, by which other questions name them, and what they came to.

        Args:
            most: so many runs at most, up to 50.
        """
        names, known = self._runs.newest(max(1, min(most, _MAX_RUNS)))
        return {"runs": [self._about(name) for name in names], "known": known}

    def run_state(self, run: str) -> dict[str, Any]:
        """Say how a run stands: its verdict once it has ended, each rank's newest step, and who waits for whom.

        Args:
            run: the name of a run, as list_runs has it.
        """
        with self._runs.opened(run) as directory:
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
            **self._runs.known(run),
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
        with self._runs.opened(run, brief=True) as directory:
            found = [finding for finding in read_findings(directory) if code.upper() in {"", finding.code}]
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
        with self._runs.opened(run) as directory:
            history = read_history(directory)
        for name in names:
            if name not in history.series:
                raise UsageError(f"there is no series {name!r}; {did_you_mean(name, history.series)}")
        count = max(2, min(points, _MAX_POINTS))
        shown = {name: _thin([(s, _number(v)) for s, v in history.series[name]], count) for name in names}
        available = [name for name, values in history.series.items() if values]
        span = [history.first, history.last]
        return {"run": run, "steps": history.steps, "span": span, "series": shown, "available": available}

    def stacks(self, run: str) -> dict[str, Any]:
        """Say where the ranks of a run are, or were last: ranks in the same place together, or what they wrote of it.

        Args:
            run: the name of a run, as list_runs has it.
        """
        with self._runs.opened(run) as directory:
            world = read_run(directory).get("world") or 1
            states = read_ranks(directory, world)
            unknown = [rank for rank in range(min(world, _MAX_RANKS)) if rank not in states]
            written = dict(_stacks(directory, unknown))
        groups = [
            {"ranks": list(one.ranks), "state": one.state, "does": one.words, "stack": list(one.stack)}
            for one in together(states)
        ]
        return {"run": run, "groups": groups, "written": written, "ranks_without_a_black_box": unknown}

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
        with self._runs.opened(run) as directory:
            known = facts_of(directory)
        return {"run": run, "world": known.world, "steps": known.steps, "facts": list(listed(known))}

    def compare_runs(self, one: str, other: str) -> dict[str, Any]:
        """Return in what two runs differ: facts, settings and versions, findings, verdicts, losses, times of a step.

        Args:
            one: the name of a run, as list_runs has it.
            other: the name of another one.
        """
        with self._runs.opened(one) as first, self._runs.opened(other) as second:
            paths = {"one": first, "other": second}
            flat = {who: dict(_flat(read_run(path))) for who, path in paths.items()}
            histories = {who: read_history(path) for who, path in paths.items()}
            facts = _differences(first, second)
        missing = object()
        settings = {
            name: {who: flat[who].get(name) for who in paths}
            for name in sorted(flat["one"].keys() | flat["other"].keys())
            if flat["one"].get(name, missing) != flat["other"].get(name, missing)
        }
        codes = {who: {finding.code for finding in found.findings} for who, found in histories.items()}
        losses = {
            who: {step: value for step, value in found.series[_LOSS] if math.isfinite(value)}
            for who, found in histories.items()
        }
        shared = [step for step in losses["one"] if step in losses["other"]]
        apart = next((step for step in shared if losses["one"][step] != losses["other"][step]), None)
        at = sorted({step for step in (apart, *shared[-1:]) if step is not None})
        return {
            "one": {**self._about(one), "step_seconds": _middle(histories["one"].series[_TIME])},
            "other": {**self._about(other), "step_seconds": _middle(histories["other"].series[_TIME])},
            "facts_that_differ": facts,
            "differ_in": settings,
            "findings_of_one_alone": sorted(codes["one"] - codes["other"]),
            "findings_of_the_other_alone": sorted(codes["other"] - codes["one"]),
            "findings_of_both": sorted(codes["one"] & codes["other"]),
            "first_step_with_another_loss": apart,
            "losses": {str(step): {who: losses[who][step] for who in paths} for step in at},
        }

    def _about(self, name: str) -> dict[str, Any]:
        about: dict[str, Any] = {"run": name}
        try:
            about |= self._runs.known(name)
            with self._runs.opened(name, brief=True) as directory:
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


def _differences(one: Path, other: Path) -> list[str]:
    """Return in words what is said otherwise of two runs; nothing where one of them has no steps."""
    try:
        return [difference.words for difference in differences(facts_of(one), facts_of(other))]
    except UsageError as error:
        return [f"not known: {error}"]


def _stacks(directory: Path, ranks: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield rank and text of the stacks that ranks have written when they were ended, or stood."""
    for rank in ranks:
        try:
            with (directory / RANKS / str(rank) / STACKS).open("rb") as file:
                yield str(rank), file.read(_MAX_STACKS).decode("utf-8", "replace")
        except OSError:
            continue


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
