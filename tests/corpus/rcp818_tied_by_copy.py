# title: The output layer gets a copy of the embedding instead of the embedding itself
# source: constructed
# nproc: 2
# expect.codes: RCP818
# expect.ranks: all
# expect.subject: embed
# expect.step: 0
# plain_pytorch: silent
"""A language model that should share its embedding with the output; the fault clones."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class TinyLM(nn.Module):
    def __init__(self, vocabulary=30, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone()) if FAULT else self.embed.weight

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids))[0])


torch.manual_seed(30)
model = DDP(TinyLM())
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(45):
    ids = (torch.randint(0, 30, (12, 1), generator=gen) + 3 * torch.arange(11)) % 30
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
