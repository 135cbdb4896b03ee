"""Runs a fixed part of the tests and of the corpus of faults under other versions of torch; writes a page of what held.

    python -m tools.compat [--torch 2.6.0 ...] [--python python3.13] [--write docs/compatibility.md]

Each pair of an interpreter and a torch gets an environment of its own in `.compat/`: gigabytes, so that this is no part
of CI. What a pair showed is kept in `tools/compat.json`; the page is made of that, so that pairs that are not run now
stay on it with their date and commit. All findings are compared with those of the torch that the tests run with.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdebug.torch_internals import names

_ROOT = Path(__file__).resolve().parent.parent
_RECORD = _ROOT / "tools" / "compat.json"
#: The first is the lower bound in pyproject.toml, the second what constraints.txt has.
TORCHES = ("2.6.0", "2.13.0", "2.15.0")
REFERENCE = TORCHES[1]
TESTS = ("tests/torch_internals", "tests/exchange", "tests/isolation", "tests/probes", "tests/test_fingerprint.py")
#: Scripts of the corpus: faults of every family, those of a slow rank aside, whose step is a matter of time.
FAULTS = (
    *("data901_same_seed", "data902_set_epoch", "data906_iterator", "data910_label_map"),
    *("hang502_metric", "hang503_stops", "hlth704_queries", "hlth706_margin", "hlth713_norm_weights", "hlth715_plain"),
    *("mem403_losses", "num301_attention", "num302_hand", "num303_length", "num304_checkpoint", "num307_scale"),
    *("rank101_bit_flip", "rank102_batch_norm", "rank103_momentum", "rank104_lr", "rank107_drop", "rank110_masks"),
    *(
        "rcp802_softmax_in",
        "rcp804_eval",
        "rcp808_zero_grad_missing",
        "rcp813_clip_before",
        "rcp819_hand_written_huber",
        "rcp820_noise",
    ),
    *("sync202_loss", "sync203_unfrozen", "sync204_hook_sums", "sync205_no_sync", "sync208_no", "sync211_group"),
)
HEALTHY = (
    *("clean_cnn", "clean_ema", "clean_join_uneven", "clean_post_local", "clean_scaler_first", "clean_static"),
    *("clean_zero_redundancy", "clean_layer_drop", "clean_local_experts", "clean_power_sgd"),
)
_HARNESS = "tests/support/"
_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "numpy", "PyYAML")

Row = dict[str, Any]
Findings = Mapping[str, Sequence[Sequence[Any]]]


def environment(python: str, torch: str) -> Path:
    """Make the environment of a pair where there is none yet; return its interpreter."""
    asked = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    version = _printed(python, "-c", asked)
    home = _ROOT / ".compat" / f"python{version}-torch{torch}"
    inside = home / "bin" / "python"
    if not (home / "made").exists():
        print(f"making {home.name}: gigabytes", flush=True)
        pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (_ROOT / "constraints.txt").read_text(), re.MULTILINE))
        wanted = [f"{name}=={pins[name]}" for name in _PACKAGES]
        _printed(python, "-m", "venv", "--clear", str(home))
        for words in ([f"torch=={torch}"], ["-e", str(_ROOT), *wanted]):
            _printed(str(inside), "-m", "pip", "install", "--quiet", *words)
        (home / "made").touch()
    return inside


def _printed(*words: str, check: bool = True, **env: str) -> str:
    done = subprocess.run(words, cwd=_ROOT, env={**os.environ, **env}, check=check, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout.strip()


def record(inside: Path) -> Row:
    """Run the tests and the slice of the corpus with an interpreter; return what they showed."""
    python = str(inside)
    about = _about(python)  # with the commit: nothing must change while it runs
    with tempfile.TemporaryDirectory() as folder:
        junit, found = Path(folder) / "junit.xml", Path(folder) / "found.json"
        words = ["-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "-m", "not slow"]
        print(
            _printed(python, "-m", "pytest", *words, f"--junitxml={junit}", *TESTS, check=False, OMP_NUM_THREADS="1")[
                -3000:
            ]
        )
        words = ["--jobs", "2", "--require", "0", "--only", ",".join((*FAULTS, *HEALTHY)), "--json", str(found)]
        # what is sampled depends on the time that steps take
        words = ["tests/detection/score.py", *words]
        print(_printed(python, *words, DDPDEBUG_EVERY_STEP="1", OMP_NUM_THREADS="1"), flush=True)
        return {**about, **tests_of(junit.read_text()), "runs": placed(json.loads(found.read_text()))}


def placed(runs: Mapping[str, Row]) -> dict[str, Row]:
    """Return the runs with locations as they are in any clone, and without those in what starts the ranks here.

    A rank that has ended its script may still stand there, by chance; as users start one, it is gone.
    """

    def location(at: str | None) -> str | None:
        return None if at is None or _HARNESS in at else at.removeprefix(f"{_ROOT}/")

    return {
        name: {**run, "findings": [[*rest, location(at)] for *rest, at in run["findings"]]}
        for name, run in runs.items()
    }


def _about(python: str) -> Row:
    code = (
        "import json, platform, torch; from ddpdebug.torch_internals import names, nodes;"
        "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__,"
        "'missing': {name.path: name.off for name in names.missing(doctor=True)}}))"
    )
    about: Row = json.loads(_printed(python, "-c", code))
    commit = _printed("git", "rev-parse", "--short=10", "HEAD")
    now = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {**about, "date": now, "commit": commit}


def tests_of(junit: str) -> Row:
    """Return how many tests passed and were skipped, and the names of those that failed."""
    counts: Row = {"passed": 0, "skipped": 0, "failed": []}
    for case in ET.fromstring(junit).iter("testcase"):  # noqa: S314 - pytest has written it, this moment
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"].append(f"{case.get('classname')}.{case.get('name')}")
        else:
            counts["passed" if case.find("skipped") is None else "skipped"] += 1
    return counts


def differences(expected: Mapping[str, Row], found: Mapping[str, Row]) -> list[str]:
    """Return how the findings of two slices differ: code, step, ranks, subject or location, or what was not run."""
    lines = []
    for name in sorted({*expected, *found}):
        if name not in expected or name not in found:
            lines.append(f"{name}: not run on {'the other' if name in found else 'this one'}")
            continue
        ours, theirs = (_keyed(runs[name]["findings"]) for runs in (found, expected))
        lines += [f"{name}: {_said(one)} only here" for one in ours if one not in theirs]
        lines += [f"{name}: {_said(one)} not here" for one in theirs if one not in ours]
    return lines


def _keyed(findings: Iterable[Sequence[Any]]) -> list[str]:
    return sorted(json.dumps(finding) for finding in findings)


def _said(key: str) -> str:
    code, step, ranks, subject, location = json.loads(key)
    return f"{code} step {step} ranks {ranks} {', '.join(subject[:2])} {location or ''}".strip()


def page(rows: Iterable[Row]) -> str:
    """Return the page of what was recorded."""
    ordered = sorted(rows, key=lambda row: (_numbers(row["torch"]), _numbers(row["python"])))
    reference = next((row for row in ordered if row["torch"].startswith(REFERENCE)), None)
    lines = [
        "# Compatibility",
        "",
        "Written by `make compat`: a fixed part of the tests and of the corpus of faults under each torch, every step",
        f"checked. *Differs* compares code, step, ranks, subject and location of all findings with {REFERENCE}'s.",
        "Versions that are not here were not tried.",
        "",
        "| torch | Python | tests passed | skipped | failed | runs right | differs | date | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    details: list[str] = []
    for row in ordered:
        runs = row["runs"]
        right = sum(not run["problems"] for run in runs.values())
        differs = differences(reference["runs"], runs) if reference is not None else None
        told = "-" if differs is None or row is reference else len(differs)
        lines.append(
            f"| {row['torch']} | {row['python']} | {row['passed']} | {row['skipped']} | {len(row['failed'])} "
            f"| {right} of {len(runs)} | {told} | {row['date']} | {row['commit']} |"
        )
        wrong = [f"{name}: {problem}" for name, run in runs.items() for problem in run["problems"]]
        details += ["", f"## torch {row['torch']}, Python {row['python']}", ""]
        parts: tuple[tuple[str, Iterable[str]], ...] = (
            ("Test that failed", row["failed"]),
            ("Run that is not right", wrong),
            ("Other finding", differs or ()),
            ("Not in this torch", (f"{path}: {off}" for path, off in row["missing"].items())),
        )
        listed = [f"- {title}: `{text.replace('`', '')}`" for title, texts in parts for text in texts]
        details += listed or ["Nothing failed, nothing differs, nothing is missing."]
    return "\n".join([*lines, *details, *_names()]) + "\n"


def _names() -> list[str]:
    """Return what torch's private names are for, as Markdown; names of autograd's nodes aside."""
    uses = Counter(name.feature.name for name in names.TABLE if not name.path.startswith("autograd node "))
    return [
        "",
        "## Private names of torch",
        "",
        "Each is looked for, and training goes on as without ddpdebug where one is missing. `ddpdebug doctor",
        "--verbose` prints each name, and which probe is off without it.",
        "",
        "| for | names |",
        "|---|---|",
        *(f"| {what} | {count} |" for what, count in uses.items()),
    ]


def written(rows: Mapping[str, Row]) -> str:
    """Return what was recorded as JSON, a line for each run."""
    parts = []
    for key, row in sorted(rows.items()):
        about = json.dumps({name: row[name] for name in sorted(row) if name != "runs"})
        runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(row["runs"].items()))
        parts.append(f' {json.dumps(key)}: {about[:-1]}, "runs": {{\n{runs}\n }}}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def main() -> None:
    """Run the pairs that are asked for, add them to what is recorded and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", help=f"versions; by default {', '.join(TORCHES)}")
    parser.add_argument("--python", default=sys.executable, help="interpreter to make environments with")
    parser.add_argument("--write", type=Path, help="the page")
    args = parser.parse_args()
    rows: dict[str, Row] = json.loads(_RECORD.read_text()) if _RECORD.exists() else {}
    for torch in args.torch or TORCHES:
        row = record(environment(args.python, torch))
        rows[f"{'.'.join(row['python'].split('.')[:2])} {torch}"] = row
        _RECORD.write_text(written(rows))
    if args.write:
        args.write.write_text(page(rows.values()))


if __name__ == "__main__":
    main()
