"""Golden runs and self-tests of `check`: `--golden` and `--self-test`."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ddpdebug.ci.golden_facts import hold_to
from ddpdebug.ci.publish import Witness, judge_directory
from ddpdebug.ci.selftest import FAULT, FAULTS, STEPS, Fault, Proof, prove
from ddpdebug.ci.verdict import Verdict, Word
from ddpdebug.disk import Disk, mode_of
from ddpdebug.errors import UsageError
from ddpdebug.facts.fact import Facts
from ddpdebug.printing import say
from ddpdebug.processes.launch import Request
from ddpdebug.run_directory.reader import read_findings, read_ignored_findings

#: Starts the ranks: (request, directory, run id, more environment).
Start = Callable[[Request, Path, str, Mapping[str, str]], Witness]
_QUIET = {"quiet": True, "metrics": "off", "every_step": True, "bundle_limit": 0, "steps": STEPS}


# --- a run held to the facts of a good one: `--golden` ----------------------------------------------------------------


def follow(request: Request, directory: Path, golden: Facts, start: Start) -> Verdict:
    """Run the script and return its verdict, with what does not hold of a good run."""
    given = {key: value for key, value in request.given.items() if key != "golden"}
    witness = start(replace(request, given=given), directory, secrets.token_hex(3), {})
    note = hold_to(golden, directory, Disk(mode_of(request.config.file_mode)))
    config = request.config
    verdict = judge_directory(directory, witness, config.fail_on, require_checks=config.require_checks)
    return _noted(verdict, note) if note else verdict


def _noted(verdict: Verdict, note: str) -> Verdict:
    return replace(verdict, notes=(*verdict.notes, note))


# --- the script with known faults in it, one short run each: `--self-test` --------------------------------------------


def prove_detectors(request: Request, directory: Path, start: Start) -> Verdict:
    """Run the script healthy, then with each fault; return the verdict of the healthy run with the proofs."""
    if (request.config.nproc_per_node or 1) < 2:
        raise UsageError("--self-test compares ranks; give --nproc-per-node 2 or more")
    given = {**request.given, **_QUIET}
    given.pop("self_test", None)
    short = replace(request, given=given, config=replace(request.config, steps=STEPS, self_test=False))
    with tempfile.TemporaryDirectory(prefix="ddpdebug-") as scratch:
        verdict = _run(short, directory, start, {})
        if verdict.word not in {Word.CLEAN, Word.UNCHECKED, Word.FINDINGS}:
            return _noted(verdict, "the script does not run as it is: nothing was proved")
        healthy = frozenset(finding.code for finding in (*verdict.failing, *verdict.others))
        proofs = tuple(_prove(short, fault, healthy, directory, start, Path(scratch)) for fault in FAULTS)
    missed = verdict.word in {Word.CLEAN, Word.UNCHECKED} and not all(proof.verified for proof in proofs)
    return replace(verdict, proofs=proofs, word=Word.MISSED if missed else verdict.word)


def _prove(
    request: Request, fault: Fault, healthy: frozenset[str], directory: Path, start: Start, scratch: Path
) -> Proof:
    say(f"ddpdebug: self-test: {fault.meaning}\n")
    folder = scratch / fault.name
    folder.mkdir()
    place = directory / "self-test" / fault.name
    Disk(mode_of(request.config.file_mode)).make_directory(place, below=directory)
    verdict = _run(request, place, start, {FAULT: f"{fault.name} {folder}"})
    note = "" if verdict.exit_code < 2 else f"its run ended as {verdict.word.value}"
    return prove(fault, [*read_findings(place), *read_ignored_findings(place)], healthy, note)


def _run(request: Request, directory: Path, start: Start, environ: Mapping[str, str]) -> Verdict:
    witness = start(request, directory, secrets.token_hex(3), environ)
    return judge_directory(directory, witness, request.config.fail_on, require_checks=request.config.require_checks)
