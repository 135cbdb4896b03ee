"""`ddpdebug equivalence`: do several ranks train like one process on the same global batch?"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ddpdebug.ci.json_junit import to_json
from ddpdebug.ci.verdict import Outcome, Verdict, Word, judge
from ddpdebug.commands._progress import progress
from ddpdebug.commands._target import load_factory, split_factory
from ddpdebug.errors import UsageError, essence
from ddpdebug.printing import say
from ddpdebug.processes.launch import RUN_ID, ranks_environment, torchrun_words
from ddpdebug.processes.supervisor import supervise
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks.text import parts
from ddpdebug.sinks.words import clean, counted

_TEXT = """Compare N ranks, each on its part of a global batch, with one process on the whole batch (SYNC209).

FACTORY is `package.module:build` or `file.py:build`, a function without arguments that returns `model, loss_fn, batch`:
a module, a function of (model, batch) that returns the loss, and the global batch, whose tensors count samples in their
first dimension. For clipping and accumulation loss_fn does the whole step up to the optimizer itself and returns None.
A function with a parameter, `build(mesh)`, gets a DeviceMesh (--mesh), shards the model by itself and returns its
part of the batch; one process calls it with a mesh of one rank. A fourth value is the optimizer to use.

Exit codes: 0 clean, 1 not equivalent, 2 wrong usage, 3 the factory or the step failed, 4 hang or lost rank.
"""


@click.command("equivalence", help=_TEXT)
@click.argument("factory")
@click.option("--nproc-per-node", type=click.IntRange(2), help="How many ranks.  [default: those of --mesh, or 2]")
@click.option(
    "--mesh", metavar="NAME=SIZE,...", help="What build(mesh) gets, as dp=2,tp=2.  [default: dp, of all ranks]"
)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="How many optimizer steps.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="Seconds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the verdict as JSON.")
@click.option("--result", type=click.Path(path_type=Path), hidden=True)
def command(result: Path | None, **options: Any) -> Callable[[], int]:
    """Check the line, and return the action that measures, to be run outside of click."""
    path, name = split_factory(options["factory"])
    options["mesh"] = _mesh(options["mesh"])
    ranks = math.prod(options["mesh"].values()) if options["mesh"] else options["nproc_per_node"] or 2
    if (options["nproc_per_node"] or ranks) != ranks or ranks < 2:
        raise UsageError(
            f"a mesh of {counted(ranks, 'rank')} does not fit --nproc-per-node {options['nproc_per_node']}"
        )
    options["nproc_per_node"] = ranks
    if result is not None or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return lambda: _as_rank(path, name, result, options)
    return lambda: _from_outside(options)


def _mesh(text: str | None) -> dict[str, int]:
    """Return dimension -> size."""
    found: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = part.partition("=")
        if not name.isidentifier() or name in found or not (size.isdecimal() and int(size)):
            raise UsageError(f"{text!r} is no mesh; write --mesh dp=2,tp=2")
        found[name] = int(size)
    return found


# --- started by a person or a CI job ----------------------------------------------------------------------------------


def _from_outside(options: Mapping[str, Any]) -> int:
    world = options["nproc_per_node"]
    with tempfile.TemporaryDirectory(prefix="ddpdebug-") as scratch:
        results, failures = Path(scratch) / "results", Path(scratch) / "failures.json"
        results.mkdir()
        words = ["equivalence", options["factory"], "--result", str(results)]
        words += ["--steps", str(options["steps"]), "--device", options["device"]]
        words += ["--mesh", ",".join(f"{k}={v}" for k, v in options["mesh"].items())] if options["mesh"] else []
        command = torchrun_words(world, words, failures)
        environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", **ranks_environment()}  # DDP warns about what is on purpose here
        with progress(f"comparing {world} ranks with one process"):
            status = supervise(command, environ, options["timeout"], RUN_ID)
        told = {rank: _read(results / f"{rank}.json") for rank in range(world)}
        statuses = {int(rank): int(code) for rank, code in _read(failures).items()} if status else {}
    usage = next((fact["usage"] for fact in told.values() if "usage" in fact), None)
    if usage is not None:
        raise UsageError(usage)
    findings = next(([Finding.from_json(line) for line in f["findings"]] for f in told.values() if "findings" in f), [])
    outcomes = {
        rank: Outcome(rank=rank, reason=fact.get("failed", "finished"), exit_code=3 if "failed" in fact else 0)
        for rank, fact in told.items()
        if fact
    }
    verdict = judge(findings, outcomes, world=world, timed_out=status is None, statuses=statuses)
    return _conclude(verdict, options)


def _read(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _conclude(verdict: Verdict, options: Mapping[str, Any]) -> int:
    if options["json_file"] is not None:
        try:
            options["json_file"].write_text(to_json(verdict, None), encoding="utf-8")
        except OSError as error:
            say(f"ddpdebug: could not write {str(options['json_file'])!r}: {error.strerror}\n")
    world = options["nproc_per_node"]
    equal = f"{world} ranks train like one process in {options['steps']} steps"
    word = f"equivalent: {equal}" if verdict.word is Word.CLEAN else verdict.word.value
    say(f"ddpdebug: verdict: {word} (exit {verdict.exit_code})\n")
    for finding in (*verdict.failing, *verdict.others):
        say(f"  {finding.code} {finding.severity.label}: {clean(finding.title)}\n")
        for label, lines in parts(finding, world):
            for line in lines:
                say(f"    {label:9}{line}\n")
    for who, words in verdict.ends(verdict.blamed).items():
        say(f"  {who}: {clean(essence(words))}\n")
    return verdict.exit_code


# --- one rank ---------------------------------------------------------------------------------------------------------


def _as_rank(path: str, name: str, result: Path | None, options: Mapping[str, Any]) -> int:
    """Measure with the other ranks and leave the result; under torchrun rank 0 prints the verdict."""
    import torch  # noqa: PLC0415 - not before a rank runs

    from ddpdebug import torch_internals as internals  # noqa: PLC0415
    from ddpdebug.ci import equivalence  # noqa: PLC0415

    internals.claim_process()
    rank, record = int(os.environ["RANK"]), dict[str, Any]()
    try:
        build = load_factory(path, name)
        device = torch.device(options["device"])
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
            torch.cuda.set_device(device)
        findings = equivalence.measure_job(build, steps=options["steps"], device=device, mesh=options["mesh"])
        record["findings"] = [finding.to_json() for finding in findings]
    except UsageError as error:
        record["usage"] = str(error)
    except Exception as error:  # noqa: BLE001 - the user's code failed, which is a verdict
        traceback.print_exc()
        record["failed"] = f"exception: {type(error).__name__}: {error}"
    if result is not None:
        (result / f"{rank}.json").write_text(json.dumps(record), encoding="utf-8")
        code = 3 if "failed" in record else 0  # all ranks come to a wrong usage alike; nobody needs to be ended
    else:
        code = _tell(record, rank, {**options, "nproc_per_node": int(os.environ["WORLD_SIZE"])})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch may abort while the interpreter ends


def _tell(record: Mapping[str, Any], rank: int, options: Mapping[str, Any]) -> int:
    if "usage" in record:
        say(f"ddpdebug: error: {record['usage']}\n")
        return UsageError.exit_code
    if "failed" in record:
        return Word.FAILED.exit_code
    findings = [Finding.from_json(line) for line in record["findings"]]
    if rank == 0:
        world = options["nproc_per_node"]
        done = {other: Outcome(rank=other, reason="finished", exit_code=0) for other in range(world)}
        return _conclude(judge(findings, done, world=world), options)
    return int(any(finding.severity >= Severity.ERROR for finding in findings))
