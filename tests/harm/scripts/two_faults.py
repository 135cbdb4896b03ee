"""Four ranks with two faults: rank 1 changes a weight of its own, later rank 2 another one; 0 and 3 stay equal.

With a folder that has the ranks' addresses, rank 0 writes down what their endpoints say in the end.
"""

import json
import re
import sys
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from common import batches, finish, report, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

NODES, STEPS = Path("targets"), 24
SAMPLE = re.compile(r"ddpdebug_(\w+)(?:\{(.*)\})? (\S+)$")


def scraped():
    """Return the samples of all ranks: for each that was scraped, name and labels -> value."""
    found = {}
    for file in sorted(NODES.glob("*.json")):
        for target in json.loads(file.read_text()):
            with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            samples = [match.groups() for line in lines if (match := SAMPLE.match(line))]
            rank = next(re.search(r'rank="(\d+)"', labels)[1] for name, labels, _ in samples if name == "step")
            found[rank] = {f"{name} {labels}": value for name, labels, value in samples}
    return found


rank = setup()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))
ddp = DDP(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
losses = []
for step, (x, y) in enumerate(batches(rank, STEPS, 8, 16, classes=5)):
    with torch.no_grad():
        if step == 6 and rank == 1:
            model[0].weight[0, 0] += 1
        if step == 12 and rank == 2:
            model[2].weight[1, 1] += 2
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    if rank == 2:
        time.sleep(0.02)
if "scrape" in sys.argv and NODES.exists() and rank == 0:
    until = time.monotonic() + 120
    while True:
        found = scraped()
        told = [next((float(v) for k, v in own.items() if k.startswith("step ")), -1) for own in found.values()]
        if (len(found) == 4 and min(told) == STEPS - 1) or time.monotonic() > until:
            break
        time.sleep(0.2)
    Path("scraped.json").write_text(json.dumps(found))
dist.barrier()
report([model], [optimizer], losses)
del ddp
finish()
