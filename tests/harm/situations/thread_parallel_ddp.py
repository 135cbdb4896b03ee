"""Two DDPs over two groups in two threads, on two ranks.

ranks: 2
"""

import threading

import torch
import torch.distributed as dist
from _report import digest, group, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

found = {}


def go(number, group):
    generator = torch.Generator().manual_seed(number)
    inner = nn.Linear(16, 4)
    with torch.no_grad():
        for p in inner.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    model = DistributedDataParallel(inner, process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    found[number] = digest(inner.state_dict())


start()
group()
groups = [dist.new_group([0, 1]) for _ in range(2)]
threads = [threading.Thread(target=go, args=(number, groups[number])) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("digests", [found.get(number) for number in range(2)])
