"""Comparison of a run with the facts of a good one, a run directory or a file (`check --golden`). Torch-free."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ddpdebug.clock import utc_now
from ddpdebug.detectors.catalog import planned
from ddpdebug.disk import Disk
from ddpdebug.errors import UsageError
from ddpdebug.facts.comparison import Difference, differences, facts_of
from ddpdebug.facts.fact import CONTRACTS, Facts
from ddpdebug.run_directory.reader import FINDINGS, SPAWNED, read_run
from ddpdebug.schema.finding import Finding

CODE = "RCP830"
#: Differences that the evidence has in full.
_TOLD = 50


def hold_to(golden: Facts, directory: Path, disk: Disk) -> str:
    """Compare a run that has ended with the facts of a good one, and add the differences to its findings.

    Returns:
        What a reader of the verdict should know of the comparison.
    """
    place = directory / SPAWNED if (directory / SPAWNED).is_dir() else directory
    try:
        known = facts_of(place)
        run = read_run(place)["run"]
    except (UsageError, ValueError) as error:
        return f"nothing was compared with the good run: {error}"
    found = differences(golden, known)
    if not found:
        return f"{len(golden.facts)} facts of the good run hold, as far as {known.steps} steps show them"
    try:
        disk.append(place / FINDINGS, finding_of(found, str(run)).to_json().encode() + b"\n")
    except OSError as error:  # a difference that nobody reads of is no clean run
        raise UsageError(f"{str(place / FINDINGS)!r} cannot be written: {error.strerror or error}") from None
    return ""


def finding_of(found: list[Difference], run: str) -> Finding:
    """Return the finding for a list of differences, titled by the first of them."""
    first, page = found[0], planned()[CODE]
    return Finding(
        code=CODE,
        severity=page["severity"],
        title=f"a fact of the good run does not hold any more: {first.words}",
        step=first.step,
        subject=first.subjects,
        phase=CONTRACTS[first.contract],
        location=first.place,
        evidence={
            "differences": [one.words for one in found[:_TOLD]],
            "number": len(found),
            "facts": [asdict(one) for one in found[:_TOLD]],
        },
        causes=page["causes"],
        actions=[page["remedy"]],
        time=f"{utc_now():%Y-%m-%dT%H:%M:%SZ}",
        run=run,
        id="golden",
    )
