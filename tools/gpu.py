"""Runs what needs CUDA, `tests/gpu` and `benchmarks/gpu.py`, and writes docs/gpu.md of what came of it.

    python -m tools.gpu --write docs/gpu.md

Where torch sees no CUDA device it ends with exit status 2 and says so: nothing is run and nothing is written. With
`--from-record` nothing is run either, and the page is made of what `tools/gpu.json` has: without it every item is *not
run*. A run replaces the record as a whole, failures included, so that the page never mixes two machines or two commits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
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
    ("Launches that a checked step adds", "at most 3, whatever the model"),
    ("Step time against plain, default settings", "at most 1.005"),
    ("The same, plain against plain: the noise", "-"),
)
NOT_RUN = "not run"


def tests_of(junit: str) -> dict[str, str]:
    """Return what became of each test that needs CUDA: `passed`, `failed` or `skipped`, by its name."""
    found = {}
    for case in ET.fromstring(junit).iter("testcase"):  # noqa: S314 - pytest has written it, this moment
        outcome = "passed" if case.find("skipped") is None else "skipped"
        bad = case.find("failure") is not None or case.find("error") is not None
        found[str(case.get("name"))] = "failed" if bad else outcome
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
    prints, launches, step = figures["fingerprint"], figures["launches"], figures["step"]
    speeds = ", ".join(f"{what} {speed:.0f} GB/s" for what, speed in prints["gb_per_second"].items())
    share = f"{prints['share']:.0%} of {prints['tensors']} tensors with {prints['bytes'] / 1e9:.2f} GB ({speeds}"
    share += ")" if prints["kernel"] else "; **without Triton**)"
    share += f", the host takes {prints['host'] * 1e6:.0f} µs to start it"
    added = NOT_RUN
    if launches is not None:
        added = f"{launches['ours']} beside {launches['plain']} of the step, of {launches['tensors']} parameters: "
        added += ", ".join(f"{kind} {number}" for kind, number in launches["kinds"].items())
    middle, low, high = step["default"]
    about = f"{step['rounds']} rounds of {step['steps']} steps of {step['seconds'] * 1e3:.1f} ms"
    about += f", {figures['model']['parameters'] / 1e6:.0f}M parameters, {figures['model']['backend']}"
    return [
        share,
        added,
        f"{middle:.4f} [{low:.4f}, {high:.4f}] ({about})",
        "{:.4f} [{:.4f}, {:.4f}]".format(*step["again"]),
    ]


def page(record: Record | None) -> str:
    """Return the page of what was recorded, or of nothing."""
    tests = {} if record is None else record["tests"]
    figures = figures_of(None if record is None else record["figures"])
    lines = [
        "# On a GPU",
        "",
        "Written by `make gpu`, which runs `tests/gpu` and `benchmarks/gpu.py` where there is a CUDA device and fails",
        "where there is none. What is *not run* here was not run on any GPU, and no other page says more.",
        "",
    ]
    if record is None:
        lines += ["**Not run**: the project had no GPU until now.", ""]
    else:
        keys = ("device", "driver", "torch", "triton", "python", "date", "commit")
        lines += ["| on | |", "|---|---|", *(f"| {key} | {record[key]} |" for key in keys), ""]
    lines += ["## What holds", "", "| what | goal | outcome |", "|---|---|---|"]
    lines += [f"| {what} | {goal} | {outcome_of(names, tests)} |" for what, goal, names in ITEMS]
    if record is not None and (remark := record.get("remark")):  # by hand, of what a failure was
        lines += ["", remark]
    lines += ["", "## What it costs", "", "| what | goal | measured |", "|---|---|---|"]
    lines += [f"| {what} | {goal} | {found} |" for (what, goal), found in zip(FIGURES, figures, strict=True)]
    lines += ["", "Ratios are medians over the rounds with the quartiles in brackets.", ""]
    lines += ["## The first report of an exhausted memory", ""]
    report = "" if record is None else record["report"].partition("\n\nat the end of the last steps:")[0]
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


def _printed(*words: str, check: bool = True, **env: str) -> str:
    done = subprocess.run(  # noqa: S603 - our own words
        words, cwd=_ROOT, env={**os.environ, **env}, check=check, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def run() -> dict[str, Any]:
    """Run the tests and the measurements on the device; return what they showed."""
    python, here = sys.executable, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        workers = min(8, max(1, (os.cpu_count() or 1) // 2))  # each of them starts jobs on the one device
        words = ["-q", "-p", "no:cacheprovider", "-m", "gpu", f"-n{workers}", f"--junitxml={junit}", "tests/gpu"]
        print(_printed(python, "-m", "pytest", *words, check=False, DDPDEBUG_REQUIRE_GPU="1", **here)[-6000:])
        if not junit.exists():
            raise SystemExit("tools.gpu: pytest has written nothing: see above")
        tests = tests_of(junit.read_text())
        text = _printed(python, "benchmarks/gpu.py", check=False, **here)
        figures = json.loads(text.splitlines()[-1]) if text.endswith("}") else None
        out = Path(folder) / "run"
        words = ["run", "--quiet", "--metrics", "off", "--memory-history", "full", "--out", str(out)]
        _printed(python, "-m", "ddpdebug", *words, "tests/gpu/scripts/out_of_memory.py", check=False, **here)
        reports = sorted(out.glob("ranks/0/memory/*.txt"))
        report = reports[0].read_text().replace(f"{_ROOT}/", "") if reports else ""
    return {**_about(), "tests": tests, "figures": figures, "report": report}


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
    args = parser.parse_args(arguments)
    if not args.from_record:
        if (reason := why_not()) is not None:
            print(f"tools.gpu: nothing was run, and {args.write} is as it was: {reason}", file=sys.stderr)
            return 2
        _RECORD.write_text(json.dumps(run(), indent=1, sort_keys=True) + "\n")
    record = json.loads(_RECORD.read_text()) if _RECORD.exists() else None
    args.write.write_text(page(record))
    if args.from_record:
        return 0
    assert record is not None
    held = all(outcome_of(names, record["tests"]) == "held" for _, _, names in ITEMS) and record["figures"]
    print(f"{args.write}: " + ("all held" if held else "not all held"))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
