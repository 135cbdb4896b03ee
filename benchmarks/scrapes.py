"""Whether 100 scrapes a second slow training down: blocks of steps with and without them, in turn, in one process.

    python benchmarks/scrapes.py [--rounds 15] [--rate 100]
    python benchmarks/scrapes.py --cost 1 4 8 64 1024 [--against CHECKOUT]

One rank trains in one thread; another process asks its endpoint for `/metrics`, so that on two cores only what happens
inside the rank (rendering, the interpreter's lock) can cost it time.
`elsewhere` asks the same of an endpoint in a third process: what that costs is the machine's share, not ours.

`--cost` measures one scrape instead: processor time of the serving process, series, bytes, and bytes as Prometheus
asks for them (gzip), with so many ranks behind one endpoint (`--metrics rank0`), each scrape rendered anew. With
`--against`, another checkout is measured in turn with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

import torch
import torch.distributed as dist
from overhead import Model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.config.settings import Config
from ddpdebug.monitor.attach import install

#: Serves as many bytes as a rank does, until its input ends.
_ELSEWHERE = """
import sys
from ddpdebug.sinks.prometheus.server import Endpoint, Serving, json_app
endpoint = Endpoint({"/metrics": json_app(lambda: "x" * int(sys.argv[1]))}, "127.0.0.1", 0, Serving())
print(endpoint.port, flush=True)
sys.stdin.read()
"""

#: Reads `on`, `elsewhere` or `off` from its input; while on, fetches the address so many times a second.
_SCRAPER = """
import http.client, select, sys, time
here, elsewhere = map(http.client.HTTPConnection, sys.argv[1:3])
client, pause, on, count, bytes_ = here, 1 / float(sys.argv[3]), False, 0, 0
next_ = time.monotonic()
while True:
    wait = max(0.0, next_ - time.monotonic()) if on else None
    if select.select([sys.stdin], [], [], wait)[0]:
        word = sys.stdin.readline().strip()
        if not word:
            break
        on, next_, client = word != "off", time.monotonic(), elsewhere if word == "elsewhere" else here
        continue
    client.request("GET", "/metrics")
    size = len(client.getresponse().read())
    if client is here:
        bytes_, count = bytes_ + size, count + 1
    next_ += pause
print(count, bytes_)
"""

#: Serves so many ranks, no two alike; prints its address, and the processor time it has had whenever a line comes.
_MANY = """
import sys, time
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import RunStarted, Saved, StepJudged
from ddpdebug.sinks.prometheus import server
from ddpdebug.sinks.prometheus.exporter import PrometheusSink
server._AT_ONCE = 1e9
world = int(sys.argv[1])
sink = PrometheusSink(0, mode="rank0")
sink.write(RunStarted(run_id="20261121-0209-abcdef", rank=0, world=world, directory=None, config={"budget": 0.01},
                      versions={"torch": "2.13.0", "ddpdebug": "0.1.0"}, node="node0"))
for rank in range(world):
    place = {"node": f"node{rank // 8}", "local_rank": rank % 8, "metrics": None}
    sink.write(Saved(kind="fact", payload={"topic": "place", "rank": rank, "value": place}))
for step in range(20):
    rows = {}
    for rank in range(world):
        part = ((rank * 7919 + step * 104729) % 1000) / 1000
        rows[rank] = Row(rank=rank, step=step, loss=2 + part, grad_norm=1.25, local_grad_norm=1 + part, lr=3e-4,
                         clip_max=1.0, clip_norm=1.25, step_seconds=0.3 + part / 100, data_seconds=0.01 * part,
                         forward_seconds=0.1 + part / 1000, backward_seconds=0.15 - part / 1000,
                         optimizer_seconds=0.02, host_bytes=int(3e9 + part * 1e8), host_private_bytes=int(2e9),
                         host_limit_bytes=int(256e9), device_allocated_bytes=int(4e10 + part * 1e9),
                         device_reserved_bytes=int(5e10), device_peak_bytes=int(6e10 + part * 1e9),
                         device_limit_bytes=int(8e10), flags=Flag.CHECKED)
    sink.write(StepJudged(step=Step(step=step, optimizer=0, world=world, rows=rows), interval=5, overhead_ratio=0.008))
sink.serve()
print(sink.url, flush=True)
for _ in sys.stdin:
    print(time.process_time(), flush=True)
"""


class Many:
    """An endpoint with so many ranks behind it, in a process of its own, from a checkout."""

    def __init__(self, world: int, checkout: Path) -> None:
        words = [sys.executable, "-c", _MANY, str(world)]
        environ = {**os.environ, "PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(  # noqa: S603
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=checkout
        )
        self._url = self._process.stdout.readline().strip()
        self.seconds: list[float] = []
        self.series = self.bytes = self.packed = 0

    def scrape(self) -> None:
        """Ask as Prometheus does, and measure what that costs the process."""
        before = self._spent()
        accept = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5"
        with urlopen(Request(self._url, headers={"Accept": accept, "Accept-Encoding": "gzip"})) as answer:  # noqa: S310
            self.packed = len(answer.read())
        self.seconds.append(self._spent() - before)

    def close(self) -> None:
        """Ask once more, for the text itself, and end."""
        with urlopen(self._url) as answer:  # noqa: S310 - an http address
            text = answer.read()
        self.bytes, self.series = len(text), sum(not line.startswith(b"#") for line in text.splitlines())
        self._process.communicate()

    def _spent(self) -> float:
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def cost(worlds: list[int], checkouts: list[Path], rounds: int) -> None:
    """Print what a scrape costs, for each number of ranks and each checkout."""
    for world in worlds:
        ends = [Many(world, checkout) for checkout in checkouts]
        for end in ends:
            end.scrape()  # what is loaded and cached only once
        for _ in range(rounds):
            for end in ends:
                end.scrape()
        for end, checkout in zip(ends, checkouts, strict=True):
            end.close()
            milliseconds = 1000 * statistics.median(end.seconds[1:])
            found = {"ranks": world, "ms": round(milliseconds, 2), "series": end.series, "bytes": end.bytes}
            print(json.dumps({**found, "gzip": end.packed, "checkout": checkout.name}), flush=True)


def main() -> None:
    """Measure and print the ratio, or the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block", type=int, default=8, help="steps of a block")
    parser.add_argument("--rate", type=float, default=100.0, help="scrapes a second")
    parser.add_argument("--cost", type=int, nargs="+", metavar="RANKS", help="measure one scrape, with so many ranks")
    parser.add_argument("--against", type=Path, help="another checkout to measure in turn, with --cost")
    args = parser.parse_args()
    if args.cost:
        here = Path(__file__).resolve().parent.parent
        cost(args.cost, [here, *([args.against.resolve()] if args.against else [])], args.rounds)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as scratch:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        monitor = install(Config(out=Path(scratch) / "run", metrics_port=port, quiet=True))
        model = DistributedDataParallel(Model(256, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            tokens = torch.randint(0, 512, (4, 129))
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for _ in range(40):  # until the schedule of the checks has settled
            step()
        size = len(urlopen(f"http://127.0.0.1:{port}/metrics").read())
        words = [sys.executable, "-c", _ELSEWHERE, str(size)]
        third = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        other = f"127.0.0.1:{int(third.stdout.readline())}"
        words = [sys.executable, "-c", _SCRAPER, f"127.0.0.1:{port}", other, str(args.rate)]
        scraper = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        times: dict[str, list[float]] = {"off": [], "on": [], "elsewhere": [], "off again": []}
        for _ in range(args.rounds):
            for way, values in times.items():
                print(way.split()[0], file=scraper.stdin, flush=True)
                for _ in range(args.block):
                    started = time.perf_counter()
                    step()
                    values.append(time.perf_counter() - started)
        output, _ = scraper.communicate()
        count, size = map(int, output.split())
        third.communicate()
        monitor.close()
    base = statistics.median(times["off"])
    spent = sum(times["on"])
    print(f"{count / spent:.0f} scrapes a second of {size // count} bytes, step {base * 1000:.0f} ms")
    print(f"with scrapes {statistics.median(times['on']) / base:.3f}", end=" · ")
    print(f"with scrapes elsewhere {statistics.median(times['elsewhere']) / base:.3f}", end=" · ")
    print(f"without again {statistics.median(times['off again']) / base:.3f}")


if __name__ == "__main__":
    main()
