"""What `make gpu` writes: only what was run on a device, and nothing where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tools import gpu

_ROOT = Path(__file__).resolve().parent.parent.parent
_FIGURES: dict[str, Any] = {
    "fingerprint": {
        "tensors": 120,
        "bytes": 1_080_000_000,
        "kernel": True,
        "gb_per_second": {"fingerprints": 2000.4, "by torch": 200.0, "plain sum": 2500.0},
        "share": 0.8,
        "host": 0.000211,
    },
    "model": {"parameters": 202_000_000, "tensors": 197, "backend": "nccl"},
    "launches": {"plain": 900, "ours": 10, "tensors": 197, "kinds": {"norms": 7, "fingerprints": 3}},
    "cost": {
        "launches take the time": {
            "rounds": 12,
            "steps": 40,
            "seconds": 0.05,
            "parameters": 5_000_000,
            "from": 500,
            **{way: {"wall": [1.004, 1.003, 1.006], "processor": [1.02, 1.01, 1.03]} for way, _, _ in gpu.WAYS},
        }
    },
}


def _record(**more: Any) -> dict[str, Any]:
    found = {name: "passed" for _, _, names in gpu.ITEMS for name in names}
    about = {"device": "a device", "driver": "1.2", "torch": "2.13.0", "triton": "3.7.1", "python": "3.11.7"}
    about |= {"date": "2026-11-25", "commit": "0123456789"}
    tests = {**about, "found": found, "report": "summary\n"}
    return {"tests": tests, "figures": {**about, "commit": "9876543210", "found": _FIGURES}, **more}


def _outcomes(text: str) -> list[str]:
    return re.findall(r"^\| (?!what|-)[^|]+\| [^|]+\| (.+) \|$", text, re.MULTILINE)


def test_without_a_record_everything_is_not_run() -> None:
    """Each item and each figure says so, beside its goal, and there is no device."""
    text = gpu.page(None)
    assert _outcomes(text) == [gpu.NOT_RUN] * (len(gpu.ITEMS) + len(gpu.FIGURES))
    assert "commit" not in text
    assert text.count("\nNot run.\n") == 1


def test_what_was_recorded_stands_with_its_device() -> None:
    """What held, what was measured, and on what."""
    text = gpu.page(_record())
    assert _outcomes(text)[: len(gpu.ITEMS)] == ["held"] * len(gpu.ITEMS)
    for said in (
        "a device, driver 1.2, torch 2.13.0, triton 3.7.1, python 3.11.7; commit 0123456789, 2026-11-25\n\n| what |",
        "; commit 9876543210, 2026-11-25\n\n| what | goal | measured |",
        "80% of 120 tensors with 1.08 GB (fingerprints 2000 GB/s, by torch 200 GB/s, plain sum 2500 GB/s)",
        "the host takes 211 µs to start it",
        "10 beside 900 of the step, of 197 parameters: norms 7, fingerprints 3 |",
        "Launches take the time: 5M parameters, steps of 50.0 ms, 12 rounds of 40, nccl.",
        "| from step 500 on | at most 1.005 | 1.004 [1.003, 1.006] | 1.020 [1.010, 1.030] |",
        "```\nsummary\n```",
    ):
        assert said in text
    assert gpu.NOT_RUN not in " ".join(_outcomes(text))


@pytest.mark.parametrize("outcome, said", [("failed", "**failed**: `"), ("skipped", gpu.NOT_RUN), (None, gpu.NOT_RUN)])
def test_an_item_holds_by_all_of_its_tests(outcome: str | None, said: str) -> None:
    """One that failed is named; one that was skipped, or is gone, has shown nothing."""
    for number, (_, _, names) in enumerate(gpu.ITEMS):
        record = _record()
        record["tests"]["found"].pop(names[-1])
        record["tests"]["found"] |= {names[-1]: outcome} if outcome else {}
        found = _outcomes(gpu.page(record))
        assert found[number].startswith(said)
        assert [other for place, other in enumerate(found[: len(gpu.ITEMS)]) if place != number] == ["held"] * (
            len(gpu.ITEMS) - 1
        )


def test_measurements_that_failed_leave_no_figure() -> None:
    """The tests stand all the same."""
    found = _outcomes(gpu.page(_record(figures={})))
    assert found[-len(gpu.FIGURES) :] == [gpu.NOT_RUN] * len(gpu.FIGURES)
    assert found[0] == "held"
    without = _record()
    without["figures"]["found"] = {**_FIGURES, "fingerprint": {**_FIGURES["fingerprint"], "kernel": False}}
    assert "**without Triton**" in gpu.page(without)


def test_tests_are_named_by_what_became_of_them() -> None:
    """With their parameters; an error is a failure, and one that has only begun is not there."""
    lines = ["tests/gpu/test_a.py::begun ", "[gw0] [ 25%] PASSED tests/gpu/test_a.py::ok[one, two]"]
    lines += ["[gw1] [ 50%] SKIPPED tests/gpu/test_a.py::s[cuda]", "[gw1] [ 75%] PASSED tests/gpu/test_a.py::e"]
    lines += ["[gw1] [ 75%] ERROR tests/gpu/test_a.py::e", "FAILED tests/gpu/test_a.py::f[cuda] - assert 1 == 2"]
    found = gpu.tests_of("\n".join(lines))
    assert found == {"ok[one, two]": "passed", "s[cuda]": "skipped", "e": "failed", "f[cuda]": "failed"}


@pytest.mark.smoke
def test_each_test_of_a_device_belongs_to_an_item() -> None:
    """Those that pytest collects for a GPU are those of the page, so that none is forgotten or misspelt."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    done = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, check=False)
    collected = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    listed = [name for _, _, names in gpu.ITEMS for name in names]
    assert sorted(collected) == sorted(listed), done.stdout + done.stderr


@pytest.mark.smoke
def test_without_a_device_nothing_is_written(tmp_path: Path) -> None:
    """It ends with 2, says why, and leaves page and record as they are; devices are hidden where there are any."""
    target, before = tmp_path / "gpu.md", _recorded()
    target.write_text("as it was\n")
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu", "--write", str(target)],
        cwd=_ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"nothing was run, and .*gpu\.md is as it was: .*CUDA", done.stderr)
    assert (target.read_text(), _recorded()) == ("as it was\n", before)


@pytest.mark.slow
def test_tests_of_a_device_fail_where_they_are_asked_for() -> None:
    """Without a device: skipped with a reason in `make test`, failed in `make gpu`."""
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu", "-k", "one_launch"]
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, "CUDA_VISIBLE_DEVICES": ""}
    for asked, status, said in (("0", 0, "make gpu runs this"), ("1", 1, "torch sees no CUDA device")):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=_ROOT,
            env={**env, "DDPDEBUG_REQUIRE_GPU": asked},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stdout
        assert said in done.stdout


def test_the_page_is_made_of_what_is_recorded() -> None:
    """Nobody has written into docs/gpu.md by hand."""
    recorded = _recorded()
    assert (_ROOT / "docs" / "gpu.md").read_text() == gpu.page(None if recorded is None else json.loads(recorded))


def test_the_triton_that_is_pinned_is_the_one_that_torch_asks_for() -> None:
    """With another one pip finds no solution where torch comes with CUDA; the build for CPUs asks for none."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (_ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")  # as the CUDA build's metadata say: look there again
    asked = [text for text in metadata.requires("torch") or () if text.startswith("triton==")]
    assert [text.partition(";")[0] for text in asked] in ([], [f"triton=={pins['triton']}"])


def _recorded() -> str | None:
    path = _ROOT / "tools" / "gpu.json"
    return path.read_text() if path.exists() else None
