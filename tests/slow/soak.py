"""Trains healthy jobs beside busy loops, for half an hour: none of them may raise an alarm.

    python tests/slow/soak.py FOLDER [--minutes 30] [--busy 2] [--again]

The steps of each job are kept in the folder, so that an alarm is a recording; `--again` judges those that are there.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
import recordings
from record import Recording, record
from sweep import judge

from ddpdebug.detectors.slow.slow601_straggler import Straggler
from ddpdebug.detectors.slow.slow602_input_bound import InputBound
from ddpdebug.detectors.slow.slow603_slowdown_over_time import SlowdownOverTime
from ddpdebug.schema.finding import Severity

KINDS = {
    "equal": Recording(4, 2, "--steps 400"),
    "two_ranks": Recording(2, 2, "--steps 600"),
    "unequal": Recording(4, 2, "--steps 300 --lengths unequal"),
    "cyclic": Recording(4, 2, "--steps 400 --lengths cyclic"),
    "turns": Recording(4, 2, "--steps 300 --lengths turns"),
    "warm_up": Recording(4, 2, "--steps 300 --warm-up 40"),
    "two_networks": Recording(2, 2, "--steps 300 --networks 2"),
    "evaluation": Recording(4, 2, "--steps 300 --evaluate-every 40"),
    "short_steps": Recording(2, 2, "--steps 2500 --width 64 --batch 64"),
}


def alarms(path: Path) -> list[str]:
    """Return what is wrongly said of a job."""
    said = judge(recordings.read(path)[1], Straggler, InputBound, SlowdownOverTime)
    return [
        f"{finding.code} of {finding.ranks}, {finding.phase}, after step {at}: {dict(finding.evidence)}"
        for finding, at in said
        if finding.severity >= Severity.WARNING
    ]


def jobs(folder: Path, minutes: float, busy: int) -> list[Path]:
    """Train one kind after another until the time is over."""
    until, found = time.monotonic() + 60 * minutes, []
    for number in count():
        for name, about in KINDS.items():
            if time.monotonic() >= until:
                return found
            found.append(record(f"{name}_{number}", replace(about, busy=busy), folder))
            print(*alarms(found[-1]), sep="\n", flush=True)
    return found


def main() -> None:
    """Train, or judge what is there; exit with 1 where something was said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--busy", type=int, default=2, help="loops on each core")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    paths = sorted(args.folder.glob("*.xz")) if args.again else jobs(args.folder, args.minutes, args.busy)
    found = {path.name: said for path in paths if (said := alarms(path))}
    for name, said in found.items():
        print(name, *said, sep="\n  ")
    print(f"{len(paths)} jobs, {len(found)} of them with an alarm")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
