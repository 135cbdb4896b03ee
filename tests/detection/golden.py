"""Golden runs: what thirty scripts of the corpus make ddpdebug see and say, before and after code was moved.

    python tests/detection/golden.py record DIR     # on the tree before
    python tests/detection/golden.py compare DIR    # on the tree after; exits 1 when a run differs

Rows, observations and findings of each run are written as text, one file a run, without what differs from run to run:
times, memory, process ids, and the order in which ranks' messages came in. A run that differs from itself (it is
recorded twice) is left out. A baseline is good for one machine and one torch only (another processor rounds
differently), so none is kept in the repository.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))
import zygote

from ddpdebug.run_directory.reader import read_findings, read_observations, read_rows
from ddpdebug.schema.row import Row

_CORPUS = Path(__file__).resolve().parent.parent / "corpus"
#: Every sixth script of the corpus, sorted by name, each with its fault: all families are among them.
_EVERY = 6
_VARYING = re.compile(r"seconds|bytes|time$|^pid|^live_graphs$")
#: Details that hold addresses, times or process ids.
_VARYING_KEYS = {
    "time",
    "run",
    "directory",
    "node",
    "metrics",
    "seconds",
    "bytes",
    "gpu_uuid",
    "path",
    "pid",
    "snapshot",
}


def _masked(value: Any) -> Any:
    """Return a JSON value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: _masked(item) for key, item in value.items() if key not in _VARYING_KEYS and "seconds" not in key}
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"/\S*/|0x[0-9a-f]+", "", value)
    return value


def _row(row: Row) -> str:
    fields = {name: value for name, value in row._asdict().items() if not _VARYING.search(name)}
    return " ".join(f"{k}={v}" for k, v in fields.items() if v and not (isinstance(v, float) and math.isnan(v)))


def text_of(directory: Path) -> str:
    """Return what a run directory holds, as text that is the same for two runs of one tree."""
    rows = sorted(read_rows(directory), key=lambda row: (row.optimizer, row.step, row.rank))
    said = sorted({json.dumps(_masked(o.payload), sort_keys=True) for o in read_observations(directory)})
    found = [json.dumps(_masked(json.loads(f.to_json())), sort_keys=True) for f in read_findings(directory)]
    parts = {"rows": map(_row, rows), "observations": said, "findings": sorted(found)}
    return "".join(f"## {name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in parts.items())


def run(script: Path) -> str:
    """Run one script with its fault on forked ranks and return the text of its run directory."""
    head = script.read_text(encoding="utf-8")
    ranks = int(re.search(r"^# nproc: (\d+)", head, re.MULTILINE)[1])  # type: ignore[index]
    scratch = Path(tempfile.mkdtemp(prefix="ddpdebug-golden-"))
    env = {"FAULT": "1", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(ranks), "DDPDEBUG_EVERY_STEP": "1"}
    more = re.search(r"^# options: (.*)$", head, re.MULTILINE)
    options = ["--out", str(scratch / "run"), "--metrics", "off", *(more[1].split() if more else [])]
    try:
        job = {"script": str(script), "args": [], "ranks": ranks, "cwd": str(scratch), "timeout": 120}
        zygote.run({**job, "options": options, "env": env})
        return text_of(scratch / "run")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    """Record or compare; exit 1 when a run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=_EVERY, help="take every n-th script of the corpus")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
    zygote.preload()
    for module in ("ddpdebug.monitor.attach", "ddpdebug.commands.run"):
        importlib.import_module(module)
    args.folder.mkdir(parents=True, exist_ok=True)
    differing = compared = 0
    scripts = sorted(_CORPUS.glob("*.py"))[:: args.every]
    for script in scripts:
        text, file = run(script), args.folder / f"{script.stem}.txt"
        if args.what == "record":
            steady = run(script) == text
            if steady:
                file.write_text(text, encoding="utf-8")
            print(f"{'recorded' if steady else 'left out'} {script.stem}: {text.count(chr(10))} lines", flush=True)
            continue
        if not file.exists():
            continue
        compared += 1
        before = file.read_text(encoding="utf-8")
        differing += text != before
        print(f"{'same     ' if text == before else 'DIFFERENT'} {script.stem}", flush=True)
        lines = difflib.unified_diff(before.splitlines(), text.splitlines(), "before", "after", lineterm="", n=0)
        for line in list(lines)[:12]:
            print(f"    {line[:300]}")
    if args.what == "compare":
        print(f"{compared - differing} passed, {differing} failed")
    return int(differing > 0 or (args.what == "compare" and not compared))


if __name__ == "__main__":
    sys.exit(main())
