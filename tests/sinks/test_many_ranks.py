"""One endpoint for a thousand ranks."""

from __future__ import annotations

import subprocess
import sys

_MEASURE = """
import sys, time, urllib.request
from pathlib import Path
from ddpdebug.schema.row import Row
from ddpdebug.sinks import RunStarted, Saved, StepJudged
from ddpdebug.sinks.prometheus.exporter import PrometheusSink
from ddpdebug.schema.step import Step

def peak() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

before = peak()
sink = PrometheusSink(0, "127.0.0.1", 0, mode="rank0")
sink.write(RunStarted(run_id="r", rank=0, world=1024, directory=None, config={}, versions={}))
for rank in range(1024):
    place = {"node": f"node{rank // 8}", "local_rank": rank % 8, "metrics": None}
    sink.write(Saved(kind="fact", payload={"rank": rank, "topic": "place", "value": place}))
rows = {rank: Row(rank=rank, loss=0.1, step_seconds=0.3, forward_seconds=0.1) for rank in range(1024)}
sink.write(StepJudged(step=Step(step=0, optimizer=0, world=1024, rows=rows)))
begun = time.process_time()
text = urllib.request.urlopen(sink.url, timeout=60).read().decode()
spent = time.process_time() - begun
after = peak()
lines = [line for line in text.splitlines() if not line.startswith("#")]
print(len(lines), sum(line.startswith("ddpdebug_step{") for line in lines), spent, after - before)
sink.close()
"""


def test_all_ranks_are_served_within_the_bounds_of_processor_time_and_memory() -> None:
    """A thousand ranks cost some tenths of a second of processor time and 20 MB; the limits are for busy machines."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True)
    series, ranks, seconds, megabytes = map(float, done.stdout.split())
    assert ranks == 1024
    assert series <= 1024 * 100
    assert seconds < 5
    assert megabytes < 200
