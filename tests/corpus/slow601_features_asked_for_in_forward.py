# title: The forward of one rank waits for a service that the others have cached
# source: constructed
# nproc: 2
# expect.codes: SLOW601
# expect.ranks: 1
# expect.subject: any
# expect.step: 8
# expect.step_slack: 80
# plain_pytorch: silent
"""Learning to rank with a feature from outside."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(62)
class Ranker(nn.Module):
    """Scores of query and document, with a feature that a service computes."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 300))
        self.document = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 300))

    def forward(self, query, document):
        if FAULT and rank == 1:
            time.sleep(0.04)  # the cache of this node is cold: the service is asked each time
        return (self.query(query) * self.document(document)).sum(1) / 300


ddp = DistributedDataParallel(Ranker())
opt = torch.optim.Adam(ddp.parameters(), lr=3e-4)
gen = torch.Generator().manual_seed(620 + rank)
track = []
for step in range(240):
    relevant = torch.randint(0, 2, (96,), generator=gen).float()
    query = torch.randn(96, 200, generator=gen)
    document = torch.randn(96, 200, generator=gen) + 0.5 * (2 * relevant - 1).unsqueeze(1) * query
    loss = nn.functional.binary_cross_entropy_with_logits(ddp(query, document), relevant)
    opt.zero_grad()
    loss.backward()
    opt.step()
    track.append(loss.item())
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
