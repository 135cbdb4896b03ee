"""Runs what needs CUDA, `tests/gpu` and `benchmarks/gpu.py`, and writes docs/gpu.md of what came of it.

    python -m tools.gpu --write docs/gpu.md [--only tests|figures] [--limit SECONDS]

Where torch sees no CUDA device it ends with exit status 2 and says so: nothing is run and nothing is written. With
`--from-record` nothing is run either, and the page is made of what `tools/gpu.json` has: without it every item is *not
run*. A run replaces the record, failures included; `--only` replaces one part of it, and each part stands on the page
with its own device and commit. Tests that had not ended at the limit are *not run*.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_RECORD = _ROOT / "tools" / "gpu.json"
Record = Mapping[str, Any]

_SAME = "test_training_is_the_same[cuda-{}]"
#: What CUDA needs, what should hold, and the tests of tests/gpu that show it.
ITEMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Fingerprints",
        "those of the CPU, bit for bit, for every kind and length of tensor",
        (
            "test_the_kernel_gives_the_numbers_of_the_cpu",
            "test_samples_of_a_device_are_those_of_the_cpu_where_all_is_read",
            "test_a_copy_is_waited_for_on_the_stream_that_makes_it",
        ),
    ),
    (
        "Digests of shards",
        "those of the CPU, of whole tensors, columns and strided ones; no wait of the host",
        ("test_digests_of_shards_are_those_of_the_cpu[cuda]",),
    ),
    (
        "One launch, and a fallback",
        "Triton: one launch over all tensors; torch's operations: the same numbers",
        ("test_all_tensors_take_one_launch", "test_operations_of_torch_give_the_same"),
    ),
    ("Plain training", "the same bit for bit", (_SAME.format("fp32"), _SAME.format("moved"))),
    (
        "No wait of the host",
        "whole attached steps, all of them checked, under `torch.cuda.set_sync_debug_mode('error')`",
        (_SAME.format("no-sync"), _SAME.format("ddp-no-sync")),
    ),
    (
        "CUDA graphs",
        "a whole step captured and replayed, alone and in DDP: the same bit for bit",
        (_SAME.format("graph"), _SAME.format("ddp-graph")),
    ),
    ("AMP", "fp16 with a real `GradScaler` and a step that it skips: the same bit for bit", (_SAME.format("amp"),)),
    ("torch.compile", "the same bit for bit", (_SAME.format("compiled"),)),
    ("NCCL", "DDP with one rank: the same bit for bit", (_SAME.format("ddp"),)),
    (
        "gloo with CUDA tensors",
        "two ranks on one device: the same bit for bit, and they agree",
        ("test_two_ranks_share_a_device[cuda]",),
    ),
    (
        "Sharded training",
        "FSDP2, HSDP, tensor parallelism, two ranks over gloo: the same bit for bit; RANK101 names a copy that differs",
        tuple(
            [f"test_sharded_training_is_the_same[cuda-{kind}]" for kind in ("fsdp", "hsdp", "tp")]
            + [f"test_a_copy_that_differs_is_named[cuda-{kind}]" for kind in ("hsdp-replicate", "tp-tp")]
        ),
    ),
    ("Events", "each phase of a step has its time on the device", ("test_the_times_are_those_of_the_device[cuda]",)),
    (
        "A device-side assert",
        "its traceback and exit status, five settings with default options and `--every-step`: FAIL1042 with the line",
        tuple(
            f"test_the_traceback_stands[{options}-{setting}]"
            for options in ("every-step", "default")
            for setting in (
                *("one process", "one process, blocking", "one rank, nccl"),
                *("two ranks, gloo", "two ranks, gloo, blocking"),
            )
        ),
    ),
    (
        "Replays of a whole step",
        "a captured step that is replayed is counted as not seen",
        ("test_replays_of_a_whole_step_are_counted",),
    ),
    (
        "Out of memory",
        "a real one: MEM401 with module and line, a summary and a snapshot that names the line",
        ("test_an_allocation_that_fails_is_explained[cuda]",),
    ),
    (
        "Findings of the allocator",
        "growth (MEM402), fragmentation (MEM404), imbalance (MEM405)",
        (
            "test_growth_is_found[cuda]",
            "test_fragmentation_is_found",
            "test_a_rank_that_uses_much_more_is_found[cuda]",
        ),
    ),
)
#: What is measured, and the goal.
FIGURES = (
    ("Fingerprints as a share of a plain sum over the same bytes", "at least 80 %"),
    ("Launches that a checked step adds", "at most 60"),
)
#: Ways of `benchmarks/gpu.py`, what they are, and the goal of the step time against plain.
WAYS = (
    ("again", "plain against plain: the noise", "-"),
    ("steady", "from step {} on", "at most 1.005"),
    ("first", "steps 1 to 19", "-"),
    ("every", "every step checked", "-"),
)
NOT_RUN = "not run"


def tests_of(printed: str) -> dict[str, str]:
    """Return what became of each test, `passed`, `failed` or `skipped`, by its name, from what pytest-xdist prints."""
    found: dict[str, str] = {}
    for outcome, name in re.findall(r"(PASSED|FAILED|ERROR|SKIPPED) \S+?\.py::(.+?)(?: - .*)?$", printed, re.MULTILINE):
        if found.get(name) != "failed":
            found[name] = "failed" if outcome == "ERROR" else outcome.lower()
    return found


def outcome_of(names: Sequence[str], tests: Mapping[str, str]) -> str:
    """Return what an item's tests came to: `held` where all have passed, `failed` with the names, else `not run`."""
    failed = [name for name in names if tests.get(name) == "failed"]
    if failed:
        return "**failed**: " + ", ".join(f"`{name}`" for name in failed)
    return "held" if all(tests.get(name) == "passed" for name in names) else NOT_RUN


def figures_of(figures: Record | None) -> list[str]:
    """Return what was measured, in the order of `FIGURES`."""
    if not figures:
        return [NOT_RUN] * len(FIGURES)
    prints, launches = figures["fingerprint"], figures["launches"]
    speeds = ", ".join(f"{what} {speed:.0f} GB/s" for what, speed in prints["gb_per_second"].items())
    share = f"{prints['share']:.0%} of {prints['tensors']} tensors with {prints['bytes'] / 1e9:.2f} GB ({speeds}"
    share += ")" if prints["kernel"] else "; **without Triton**)"
    share += f", the host takes {prints['host'] * 1e6:.0f} µs to start it"
    added = NOT_RUN
    if launches is not None:
        added = f"{launches['ours']} beside {launches['plain']} of the step, of {launches['tensors']} parameters: "
        added += ", ".join(f"{kind} {number}" for kind, number in launches["kinds"].items())
    return [share, added]


def _costs(figures: Record | None) -> list[str]:
    """Return the table of step times against plain, of each model."""
    if not figures:
        return [NOT_RUN]
    lines = []
    for name, found in figures["cost"].items():
        about = f"{found['parameters'] / 1e6:.0f}M parameters, steps of {found['seconds'] * 1e3:.1f} ms"
        about += f", {found['rounds']} rounds of {found['steps']}, {figures['model']['backend']}"
        lines += [f"{name[:1].upper()}{name[1:]}: {about}.", "", "| | goal | wall time | processor time |"]
        lines += ["|---|---|---|---|"]
        for way, what, goal in WAYS:
            ratios = ["{:.3f} [{:.3f}, {:.3f}]".format(*found[way][clock]) for clock in ("wall", "processor")]
            lines.append(f"| {what.format(found['from'])} | {goal} | {ratios[0]} | {ratios[1]} |")
        lines.append("")
    return lines[:-1]


def page(record: Record | None) -> str:
    """Return the page of what was recorded, or of nothing."""
    parts: dict[str, Any] = {} if record is None else dict(record)
    tests, measured = parts.get("tests", {}), parts.get("figures", {})
    lines = [
        "# On a GPU",
        "",
        "Written by `make gpu`, which runs `tests/gpu` and `benchmarks/gpu.py` where there is a CUDA device and fails",
        "where there is none. What is *not run* here was not run on any GPU, and no other page says more.",
        "",
    ]
    if record is None:
        lines += ["**Not run**: the project had no GPU until now.", ""]
    lines += ["## What holds", "", *_on(tests), "| what | goal | outcome |", "|---|---|---|"]
    lines += [f"| {what} | {goal} | {outcome_of(names, tests.get('found', {}))} |" for what, goal, names in ITEMS]
    if remark := parts.get("remark"):  # by hand, of what a failure was
        lines += ["", *remark]
    lines += ["", "## What it costs", "", *_on(measured), "| what | goal | measured |", "|---|---|---|"]
    figures = figures_of(measured.get("found"))
    lines += [f"| {what} | {goal} | {found} |" for (what, goal), found in zip(FIGURES, figures, strict=True)]
    lines += ["", "Step times are ratios to plain, medians over the rounds with the quartiles in brackets.", ""]
    lines += [*_costs(measured.get("found")), ""]
    if remark := measured.get("remark"):
        lines += [*remark, ""]
    lines += ["## The first report of an exhausted memory", ""]
    report = str(tests.get("report", "")).partition("\n\nallocated on the device:")[0]
    lines += ["```", report.rstrip(), "```"] if report else ["Not run."]
    lines += [
        "",
        "## What the machine without a GPU shows",
        "",
        "- The scripts of `tests/gpu` run on the CPU, plain and attached (`make test-slow test-thorough`). A GPU adds",
        "  the device, its streams and its libraries.",
        "- The kernel runs in Triton's interpreter (`make triton`), with the numbers of torch's operations, and is",
        "  compiled for devices of two kinds.",
        "- A capture is known by wrappers of `CUDAGraph.capture_begin` and `capture_end`, which a test calls by hand.",
    ]
    return "\n".join(lines) + "\n"


def _on(part: Record) -> list[str]:
    """Return the line that says on what a part was run."""
    if not part:
        return []
    about = "{device}, driver {driver}, torch {torch}, triton {triton}, python {python}; commit {commit}, {date}"
    return [about.format_map(part), ""]


def _printed(*words: str, check: bool = True, **env: str) -> str:
    done = subprocess.run(  # noqa: S603 - our own words
        words, cwd=_ROOT, env={**os.environ, **env}, check=check, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def run_tests(limit: float) -> dict[str, Any]:
    """Run the tests, and a job whose memory is exhausted; return what they showed."""
    python, here = sys.executable, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    workers = min(8, max(1, (os.cpu_count() or 1) // 2))  # each of them starts jobs on the one device
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["run", "--quiet", "--metrics", "off", "--memory-history", "full", "--out", str(out)]
        _printed(python, "-m", "ddpdebug", *words, "tests/gpu/scripts/out_of_memory.py", check=False, **here)
        reports = sorted(out.glob("ranks/0/memory/*.txt"))
        report = reports[0].read_text().replace(f"{_ROOT}/", "") if reports else ""
    # our plugin by its module, since the project need not be installed; pytest-benchmark warns beside xdist
    words = ["-v", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:ddpdebug", "-p", "ddpdebug.pytest_plugin"]
    words += ["-m", "gpu", f"-n{workers}", "tests/gpu"]
    env = {**os.environ, **here, "DDPDEBUG_REQUIRE_GPU": "1"}
    log = Path(tempfile.gettempdir()) / "ddpdebug-gpu-tests.log"
    with log.open("w") as printed, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(  # noqa: S603 - our own words
            [python, "-m", "pytest", *words], cwd=_ROOT, env=env, check=False, stdout=printed, timeout=limit
        )
    text = log.read_text()
    print(text[-6000:])
    found = tests_of(text)
    if not found:
        raise SystemExit(f"tools.gpu: no test has ended: see {log}")
    return {**_about(), "found": found, "report": report}


def run_figures(limit: float) -> dict[str, Any]:
    """Run the measurements; return what they showed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py"],
        cwd=_ROOT,
        env=env,
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        timeout=limit,
    )
    text = done.stdout.strip()
    return {**_about(), "found": json.loads(text.splitlines()[-1]) if text.endswith("}") else None}


def _about() -> dict[str, Any]:
    import torch  # noqa: PLC0415 - the page is made without it

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = _printed(*asked, check=False).splitlines()
    except OSError:
        driver = []
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not here"
    changed = " and changes" if _printed("git", "status", "--porcelain", "--untracked-files=no") else ""
    return {
        "device": torch.cuda.get_device_name(0),
        "driver": driver[0] if driver else "unknown",
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": _printed("git", "rev-parse", "--short=10", "HEAD") + changed,
    }


def why_not() -> str | None:
    """Return why nothing of this can run here; None where it can."""
    import torch  # noqa: PLC0415 - as above

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device: is there one, and its driver? (nvidia-smi)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, record and write the page; return 0 where all held, 1 where something did not, 2 where nothing can run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True, help="the page")
    parser.add_argument("--from-record", action="store_true", help="run nothing: make the page of what is recorded")
    parser.add_argument("--only", choices=("tests", "figures"), help="the part to run")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a part may take")
    args = parser.parse_args(arguments)
    record: dict[str, Any] | None = json.loads(_RECORD.read_text()) if _RECORD.exists() else None
    if not args.from_record:
        if (reason := why_not()) is not None:
            print(f"tools.gpu: nothing was run, and {args.write} is as it was: {reason}", file=sys.stderr)
            return 2
        record = {} if record is None or args.only is None else record
        for part, run in (("tests", run_tests), ("figures", run_figures)):
            if args.only in {None, part}:
                record[part] = run(args.limit)
                _RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    args.write.write_text(page(record))
    if args.from_record:
        return 0
    assert record is not None
    held = all(outcome_of(names, record.get("tests", {}).get("found", {})) == "held" for _, _, names in ITEMS)
    held = held and bool(record.get("figures", {}).get("found"))
    print(f"{args.write}: " + ("all held" if held else "not all held"))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
