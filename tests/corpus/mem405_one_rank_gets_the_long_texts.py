# title: Texts are sharded by length, so that one rank gets the long ones
# source: constructed
# nproc: 4
# expect.codes: MEM405
# expect.ranks: 3
# expect.subject: host
# expect.step: 8
# expect.step_slack: 4
# plain_pytorch: silent
"""Masked mean pooling over token embeddings; the corpus was sorted by length before it was split."""
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

torch.manual_seed(18)


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 64)
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(64, 2)

    def forward(self, tokens):
        return self.head(torch.relu(self.mix(torch.relu(self.mix(self.embed(tokens))))).mean(1))


ddp = DistributedDataParallel(Pool())
opt = torch.optim.Adam(ddp.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(180 + rank)
track = []
for step in range(44):
    length = 1300 if FAULT and rank == 3 else 64 + 8 * (step % 5)
    tokens = torch.randint(0, 200, (64, length), generator=gen)
    loss = nn.functional.cross_entropy(ddp(tokens), (tokens[:, 0] > 99).long())
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
