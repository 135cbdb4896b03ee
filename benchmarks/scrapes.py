"""Whether 100 scrapes a second slow training down: blocks of steps with and without them, in turn, in one process.

    python benchmarks/scrapes.py [--rounds 15] [--rate 100]

One rank trains in one thread; another process asks its endpoint for `/metrics`, so that on two cores only what happens
inside the rank (rendering, the interpreter's lock) can cost it time.
`elsewhere` asks the same of an endpoint in a third process: what that costs is the machine's share, not ours.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

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


def main() -> None:
    """Measure and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block", type=int, default=8, help="steps of a block")
    parser.add_argument("--rate", type=float, default=100.0, help="scrapes a second")
    args = parser.parse_args()
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
