"""Reproducibility: seeded generators, and bit-for-bit agreement of two runs from one state."""

from __future__ import annotations

import os
from typing import Any

import torch

from ddpdebug.clock import time
from ddpdebug.forensics.replay.stack_lines import line_of
from ddpdebug.isolation.process_state import kept_random_state
from ddpdebug.preflight.capture.seed_watch import NOT_USED, torch_is_seeded
from ddpdebug.preflight.checks.two_runs import Difference, Twice
from ddpdebug.preflight.output.results import Check, Status, Table
from ddpdebug.preflight.sandbox.trials import attempt
from ddpdebug.preflight.subject import Subject
from ddpdebug.sinks.words import counted

CODE = "RCP815"
SECONDS = 6.0
#: An optimizer's state is made in the first step and used from the second on; the third shows that it went on.
STEPS = 3
#: The share of the time after which no third step is begun: a second run of the same length follows.
_SHARE = 0.3
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def check(subject: Subject, *, seconds: float = SECONDS) -> list[Check]:
    """List the seeded generators; run the first steps twice on copies and compare.

    Args:
        seconds: for both runs; a search for the operation that differs takes about ten times as long as a run.
    """
    return [
        *attempt("seeds", lambda: [_seeds(subject)]),
        *attempt("two runs", lambda: [_two_runs(subject, seconds)]),
    ]


def _seeds(subject: Subject) -> Check:
    rows = [*_generators(subject.facts), *_loaders(subject.facts), *_settings()]
    missing = [name for name, state, _ in rows if state == "not seeded"]
    words = f"not seeded: {', '.join(missing)}" if missing else "no generator was found without a seed"
    return Check(
        Status.INFO if missing else Status.PASS,
        f"{words}; deterministic algorithms are {'on' if _deterministic() else 'off'}",
        code=CODE,
        evidence={"not_seeded": missing},
        hypotheses=("nobody asked for runs that can be repeated",),
        actions=("seed torch alike on all ranks, `random` and numpy by rank, at the beginning of the script",),
        tables=(Table(head=("source", "state", "what to know"), rows=tuple(rows)),),
    )


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _generators(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    seen = facts.get("seeded")
    rows = []
    for name, what in (
        ("random", "Python's generator"),
        ("numpy", "numpy's global generator"),
        ("torch", "torch, CPU"),
    ):
        known = name == "torch" or seen is not None
        place = (seen or {}).get(name, "")
        seeded = bool(place) or (name == "torch" and torch_is_seeded())
        state = place if place == NOT_USED else "seeded" if seeded else "not seeded" if known else "unknown"
        rows.append((what, state, f"at {place}" if state == "seeded" and place else ""))
    if torch.cuda.is_available():
        seeded = bool(seen and ("cuda" in seen or "torch" in seen)) or torch_is_seeded()
        rows.append(("torch, CUDA", "seeded" if seeded else "not seeded", "torch.manual_seed seeds it too"))
    value = os.environ.get("PYTHONHASHSEED")
    fixed = bool(value and value.isdecimal())
    rows.append(("PYTHONHASHSEED", f"set to {value}" if fixed else "not set", "orders sets of strings"))
    return rows


def _loaders(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for loader in facts.get("loaders", ()):
        if not loader.get("trains", True):
            continue
        own = bool(loader.get("generator"))
        rows.append(("DataLoader, generator", "its own" if own else "torch's", "decides order and the workers' seeds"))
        workers = int(loader.get("workers", 0))
        note = "with a worker_init_fn of the script's" if loader.get("worker_init") else "seeded from the generator"
        rows.append(("DataLoader, workers", str(workers), note if workers else "samples are made in this process"))
    return rows


def _settings() -> list[tuple[str, str, str]]:
    cudnn = torch.backends.cudnn
    precision = torch.get_float32_matmul_precision()
    rows = [("deterministic algorithms", "on" if _deterministic() else "off", "torch.use_deterministic_algorithms")]
    if torch.cuda.is_available():
        rows += [
            ("cudnn.benchmark", "on" if cudnn.benchmark else "off", "on: another algorithm may be chosen in each run"),
            ("cudnn.deterministic", "on" if cudnn.deterministic else "off", "off: some backwards add in any order"),
            ("TF32", "off" if precision == "highest" else "on", "the same twice, but not on other devices"),
            (_WORKSPACE, os.environ.get(_WORKSPACE, "not set"), "cuBLAS needs it to be deterministic"),
        ]
    return rows


def _two_runs(subject: Subject, seconds: float) -> Check:
    if not subject.batches:
        return Check(Status.SKIPPED, "there are no batches")
    with kept_random_state() as state:
        twice = Twice(subject, state)
        began, first = time.monotonic(), []
        for found in twice.digests(STEPS):
            first.append(found)
            passed = time.monotonic() - began
            if passed > seconds or (len(first) > 1 and passed > seconds * _SHARE):
                break
        second = list(twice.digests(len(first)))
        step = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a[1] != b[1]), None)
        if step is None:
            words = f"losses, gradients and parameters were the same bit for bit over {counted(len(first), 'step')}"
            return Check(Status.PASS, words, evidence={"steps": len(first), "losses": [loss for loss, _ in first]})
        return _differing(step, first[step][0], second[step][0], twice.search(step + 1))


def _differing(step: int, first: float, second: float, found: Difference | None) -> Check:
    evidence: dict[str, Any] = {"step": step, "loss": first, "loss_again": second}
    if found is None:
        place = "which operation it is did not show again"
    else:
        line = line_of(found.stack[0]) if found.stack else ""
        where = [f"module {found.module}"] if found.module else []
        where += [line] if line else []
        kind = "backward of " if found.backward and found.stack else ""
        other = f" (the first run called {found.instead})" if found.instead else ""
        place = f"the first operation that differs is {found.operation}{other}"
        place += f", {kind}{', '.join(where)}" if where else ""
        evidence |= {"operation": found.operation, "module": found.module, "lines": list(found.stack)}
    return Check(
        Status.INFO,
        f"two runs from the same seeds and weights part in step {step}: {place}",
        code=CODE,
        evidence=evidence,
        hypotheses=(
            "a generator of its own: numpy.random.default_rng(), secrets, a torch.Generator outside of the model",
            "an operation that adds in any order: index_add, scatter_add, the backward of interpolation, on a device",
            "state outside of the model: a counter, a cache, time",
            "an order that is not fixed: sets, directory listings, threads",
        ),
        actions=(
            "call `torch.use_deterministic_algorithms(True)`: torch then names its own operations",
            "draw from torch's, numpy's or Python's global generator, or seed the one that is used",
        ),
    )
