"""What a hub bears: live runs at the pace of a saved one, pushed as jobs push, while pages are read.

    python benchmarks/hub.py [--runs 200] [--ranks 8] [--step 0.3] [--seconds 60] [--data URL]

A hub serves in a process of its own, as `ddpdebug hub` does. Another process writes the run directories, a step at a
time, and sends every two seconds what is new by the classes that a job's pusher uses; every tenth run has a finding.
Meanwhile this process asks for pages one after the other. Printed are the times of the answers, how late batches were,
the processor time and the memory of the hub, and in the end whether it has every byte of every directory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ddpdebug.hub.store import Store
from ddpdebug.processes.pusher import Post
from ddpdebug.run_directory.mirror import Mirror
from ddpdebug.run_directory.reader import steps_header
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import DIGESTS, ROW_BYTES, Digest, Row, encode
from ddpdebug.sinks import FindingRaised, RunStarted

_EVERY, _SENDERS = 2.0, 8
_PAGES = ("/", "/?state=ill", "/runs/{key}", "/groups", "/api/v1/runs?limit=50")
_FOUND = Finding(
    code="RANK104", severity=Severity.CRITICAL, title="optimizer settings differ between ranks", step=20, last_step=20,
    ranks=(1,), subject=("param_groups[0].lr",), evidence={"values": {"0": 0.1, "1": 0.2}}, id="RANK104-1",
)  # fmt: skip


def saved(path: Path, ranks: int, steps: int, seconds: float) -> None:
    """Write the rows of a run."""
    draw = random.Random(0)  # noqa: S311 - no secret
    with path.open("wb") as file:
        file.write(steps_header(0))
        for step in range(steps):
            digests = {name: Digest(draw.getrandbits(63)) for name in DIGESTS}
            for rank in range(ranks):
                row = Row(rank=rank, step=step, loss=3 / (1 + step / 50) + draw.random() / 10, step_seconds=seconds)
                file.write(encode(row._replace(**digests)))


def begin(folder: Path, number: int, ranks: int) -> Path:
    """Begin the directory of a run."""
    directory, now = folder / f"run{number:03}", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    sink = RunDirectory(directory, 0)
    about = {"config": {"budget": 0.01}, "versions": {"torch": "2.13.0"}, "command": ("train.py", f"--seed={number}")}
    sink.write(RunStarted(run_id=f"{number:06x}", rank=0, world=ranks, directory=directory, time=now, **about))
    if number % 10 == 0:
        sink.write(FindingRaised(finding=replace(_FOUND, time=now, run=f"{number:06x}")))
    sink.close()
    return directory


def replay(url: str, folder: Path, arguments: argparse.Namespace, told: object) -> None:
    """Let the runs write and push, and tell how late that was."""
    rows = (folder / "rows").read_bytes()
    directories = [begin(folder, number, arguments.ranks) for number in range(arguments.runs)]
    mirrors = [Mirror(directory) for directory in directories]
    posts = [Post(url, mirror.key, lambda: "") for mirror in mirrors]
    late: list[float] = []
    failed: list[str] = []
    begun = time.monotonic()

    def push(number: int, due: float) -> None:
        try:
            mirrors[number].bring(posts[number].send)
        except Exception as error:  # noqa: BLE001 - counted
            failed.append(f"{type(error).__name__}: {error}")
        late.append(time.monotonic() - due)

    size = arguments.ranks * ROW_BYTES
    written = [0] * arguments.runs
    with ThreadPoolExecutor(_SENDERS) as senders:
        rounds = int(arguments.seconds / _EVERY)
        for number in range(rounds * arguments.runs):
            run, due = number % arguments.runs, begun + number * _EVERY / arguments.runs
            time.sleep(max(0.0, due - time.monotonic()))
            until = 24 + size * int((due - begun) / arguments.step)
            with (directories[run] / "steps.bin").open("ab") as file:
                file.write(rows[written[run] : until])
            written[run] = max(written[run], until)
            senders.submit(push, run, due)
    for number in range(arguments.runs):
        push(number, time.monotonic())
    told.send((late[: rounds * arguments.runs], failed, [mirror.key for mirror in mirrors]))  # type: ignore[attr-defined]  # a pipe


def quantiles(seconds: list[float]) -> str:
    """Return the median, the 95th percentile and the most, in milliseconds."""
    ordered = sorted(seconds)
    return " · ".join(
        f"{name} {1e3 * value:.0f} ms"
        for name, value in (
            ("median", statistics.median(ordered)),
            ("95th percentile", ordered[int(0.95 * (len(ordered) - 1))]),
            ("most", ordered[-1]),
        )
    )


def usage(process: int) -> tuple[float, float]:
    """Return the seconds of processor time of a process, and the most memory that it has had, in MiB."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    peak = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(peak.split()[1]) / 1024


def ask(url: str, path: str) -> float:
    """Return the seconds that an answer takes."""
    began = time.perf_counter()
    with urllib.request.urlopen(url + path, timeout=60) as answer:  # noqa: S310 - the hub's
        answer.read()
    return time.perf_counter() - began


def options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--step", type=float, default=0.3, help="seconds")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--data", default="", help="of the hub; the default is a file of SQLite")
    return parser.parse_args()


def main() -> None:
    """Measure."""
    arguments = options()
    folder = Path(tempfile.mkdtemp(prefix="ddpdebug-hub-"))
    data = arguments.data or str(folder / "hub.db")
    saved(folder / "rows", arguments.ranks, int(arguments.seconds / arguments.step) + 10, arguments.step)
    words = [sys.executable, "-m", "ddpdebug", "hub", "--port", "0", "--data", data]
    began = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as hub:  # noqa: S603 - this python
        try:
            assert hub.stdout is not None
            url = hub.stdout.readline().split()[3].rstrip(",")
            print(f"the hub serves after {time.monotonic() - began:.1f} s", flush=True)
            ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
            target = (url, folder, arguments, theirs)
            jobs = multiprocessing.get_context("spawn").Process(target=replay, args=target)
            jobs.start()
            time.sleep(2 * _EVERY)
            before, at = usage(hub.pid), time.monotonic()
            with urllib.request.urlopen(f"{url}/api/v1/runs?limit=2", timeout=60) as answer:  # noqa: S310 - as above
                keys = [run["key"] for run in json.load(answer)["runs"]]
            times: dict[str, list[float]] = {page: [] for page in _PAGES}
            while time.monotonic() - at < arguments.seconds - 3 * _EVERY:
                for page in _PAGES:
                    times[page].append(ask(url, page.format(key=keys[0])))
                    time.sleep(0.1)
            share = (usage(hub.pid)[0] - before[0]) / (time.monotonic() - at)
            while not ours.poll(1.0):
                assert jobs.is_alive()
            late, failed, known = ours.recv()
            jobs.join()
            about = f"{arguments.runs} runs of {arguments.ranks} ranks, a step each {arguments.step} s"
            print(f"{about}, load {os.getloadavg()[0]:.0f}")
            times["all pages"] = [each for taken in times.values() for each in taken]
            print("\n".join(f"  {page:32} {quantiles(taken)}" for page, taken in times.items()))
            print(f"  {'a batch, from when it was due':32} {quantiles(late)}; {len(late)} sent, {len(failed)} failed")
            for reason in sorted(set(failed))[:5]:
                print(f"    {reason}")
            print(f"  the hub: {100 * share:.0f} % of a core, {usage(hub.pid)[1]:.0f} MiB at most")
        finally:
            hub.terminate()
            hub.wait()
    store = Store(data)
    wrong = [
        key
        for number, key in enumerate(known)
        if store.content(key, "steps.bin") != (folder / f"run{number:03}" / "steps.bin").read_bytes()
    ]
    print(f"  of {len(known)} run directories the hub has every byte of {len(known) - len(wrong)}")
    store.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
