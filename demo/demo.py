"""`make demo`: trains a small transformer on 4 ranks, breaks two of them on the way, and shows what ddpdebug says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
BREAK_WEIGHT, BREAK_LR = 60, 140
_SHOWN = ("ddpdebug_step{", "ddpdebug_loss{", "ddpdebug_ranks_disagreeing{", "ddpdebug_findings_total{")


def scrape(url: str) -> list[str]:
    """Return the lines of /metrics that are not comments; empty when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own endpoint on loopback
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return []
    return [line for line in text.splitlines() if not line.startswith("#")]


def watch_metrics(out: Path, kept: list[str], done: threading.Event) -> None:
    """Scrape rank 0 once a second until the job ends; `kept` holds the last good answer and its address."""
    while not done.wait(1.0):
        try:
            url = json.loads((out / "run.json").read_text()).get("metrics_url")
        except (OSError, ValueError):
            continue
        lines = scrape(url) if url else []
        if lines:
            kept[:] = [url, *lines]


def main() -> int:
    """Run the demo; exit 0 when both faults were found where they were planted."""
    out = Path("ddpdebug-runs") / time.strftime("demo-%Y%m%dT%H%M%SZ", time.gmtime())
    words = [
        sys.executable, "-m", "ddpdebug", "run", "--nproc-per-node", "4", "--out", str(out),
        str(HERE / "train.py"), "--break-weight", str(BREAK_WEIGHT), "--break-lr", str(BREAK_LR),
    ]  # fmt: skip
    print("A transformer trains on 4 ranks. Nobody tells ddpdebug that")
    print(f"  - after step {BREAK_WEIGHT} one weight of rank 2 is corrupted (as by a bit flip), and")
    print(f"  - after step {BREAK_LR} the learning rate of rank 1 is tripled.")
    print("$ " + " ".join(["ddpdebug", *words[3:]]), flush=True)
    started = time.monotonic()
    kept: list[str] = []
    done = threading.Event()
    scraper = threading.Thread(target=watch_metrics, args=(out, kept, done))
    scraper.start()
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        status = subprocess.run(words, check=False, env=environment).returncode  # noqa: S603 - our own words
    finally:
        done.set()
        scraper.join()
    found = [json.loads(line) for line in (out / "findings.jsonl").read_text().splitlines()]
    weight = next((f for f in found if f["code"] == "RANK101" and f["ranks"] == [2]), None)
    rate = next((f for f in found if f["code"] == "RANK104" and f["ranks"] == [1]), None)
    print(
        f"\nThe job ran {time.monotonic() - started:.0f} s. What {kept[0] if kept else 'nobody'} exported while it ran:"
    )
    for line in kept[1:]:
        if line.startswith(_SHOWN) and not line.endswith(" 0.0"):
            print("  " + line)
    print("\nNext:")
    print(f"  less {out}/findings.jsonl")
    print("  ddpdebug explain RANK101")
    print("  ddpdebug run --nproc-per-node 2 YOUR_SCRIPT.py")
    if status == 0 and weight and rate:
        print("\nBoth faults were found, on the right rank.")
        return 0
    print("\nThe demo did not find both faults: please report this.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
