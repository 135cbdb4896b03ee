"""Adds delays to recorded noise and counts what SLOW601 says: the table in docs/slowness.md.

    python tests/slow/sweep.py [--write docs/slowness.md]

The recordings are healthy jobs; a share of their usual step is added to one rank's phase in each step after the first
third, and the others wait for it as they would.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import recordings

from ddpdebug.detectors.slow.slow601_straggler import Straggler
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.step import Step

SHARES = (0.0, 0.1, 0.15, 0.2, 0.3)
PHASES = {
    "data": "data_seconds",
    "forward": "forward_seconds",
    "backward": "backward_local_seconds",
    "optimizer": "optimizer_seconds",
}
_BLOCK = ("<!-- sweep -->\n", "<!-- end of sweep -->\n")


@dataclass
class Score:
    """What was said of so many runs."""

    runs: int = 0
    found: int = 0
    phase: int = 0
    wrong: int = 0
    after: list[int] | None = None


def delayed(steps: Iterable[Step], rank: int, phase: str, seconds: float, begin: int) -> list[Step]:
    """Return the steps with a delay on a rank, for which the others wait."""
    found = []
    for step in steps:
        rows = dict(step.rows)
        if step.step >= begin and seconds:
            slowest = max(row.own_seconds for row in rows.values())
            longer = max(0.0, rows[rank].own_seconds + seconds - slowest)
            for other, row in rows.items():
                late = seconds if other == rank else 0.0
                wait = max(0.0, longer - late)
                more = {PHASES[phase]: getattr(row, PHASES[phase]) + late}
                more |= {"step_seconds": row.step_seconds + late + wait}
                more |= {"sync_wait_seconds": row.sync_wait_seconds + wait}
                in_backward = wait + (late if phase == "backward" else 0.0)
                rows[other] = row._replace(**more, backward_seconds=row.backward_seconds + in_backward)
        found.append(replace(step, rows=rows))
    return found


def judge(steps: Iterable[Step], *rules: type) -> list[tuple[Finding, int]]:
    """Return the findings of rules, each with the step after which it was said first."""
    steps = list(steps)
    diagnosis = Diagnosis(world=steps[0].world, detectors=[rule() for rule in rules])
    found: dict[str, Finding] = {}
    said: dict[str, int] = {}
    for step in steps:
        diagnosis.feed(step)
        for finding, _ in diagnosis.tick():
            found[finding.id] = finding
            said.setdefault(finding.id, step.step)
    for finding, _ in diagnosis.finish():
        found[finding.id] = finding
        said.setdefault(finding.id, steps[-1].step)
    return [(found[name], said[name]) for name in found]


def usual_step(steps: Iterable[Step]) -> float:
    """Return the median step."""
    return statistics.median(row.step_seconds for step in steps for row in step.rows.values())


def sweep() -> dict[float, Score]:
    """Return the score of each share."""
    scores = {share: Score(after=[]) for share in SHARES}
    for path in sorted(recordings.FOLDER.glob("healthy*")):
        steps = recordings.read(path)[1]
        usual, begin = usual_step(steps), steps[len(steps) // 3].step
        for share in SHARES:
            for rank in range(steps[0].world if share else 1):
                for phase in PHASES if share else ["forward"]:
                    said = judge(delayed(steps, rank, phase, share * usual, begin), Straggler)
                    alarms = [(f, at) for f, at in said if f.severity >= Severity.WARNING]
                    right = [(f, at) for f, at in alarms if f.ranks == (rank,) and share]
                    score = scores[share]
                    score.runs += 1
                    score.found += bool(right)
                    score.phase += any(f.phase == phase for f, _ in right)
                    score.wrong += len(right) < len(alarms)
                    score.after += [at - begin for _, at in right[:1]]
    return scores


def table(scores: dict[float, Score]) -> str:
    """Return the table."""
    lines = [
        "| added, of a step | runs | rank found | with its phase | another rank | steps until then: median, longest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for share, score in scores.items():
        after = f"{statistics.median(score.after):.0f}, {max(score.after)}" if score.after else "-"
        told = f"{score.found} | {score.phase}" if share else "- | -"
        lines.append(f"| {100 * share:.0f} % | {score.runs} | {told} | {score.wrong} | {after} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    text = table(sweep())
    print(text)
    if args.write is not None:
        page = args.write.read_text()
        args.write.write_text(re.sub(f"(?s)(?<={_BLOCK[0]}).*(?={_BLOCK[1]})", lambda _: text, page))


if __name__ == "__main__":
    main()
