# title: The output layer is initialised a hundred times too large
# source: constructed
# nproc: 2
# expect.codes: RCP801
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""A next-token model; the fault initialises the output with standard deviation 1 over a wide layer."""
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


class Next(nn.Module):
    def __init__(self, vocabulary=40, width=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.out.weight, std=2.0 if FAULT else 0.02)

    def forward(self, pair):
        return self.out(self.norm(torch.tanh(self.hidden(self.embed(pair).flatten(1)))))


torch.manual_seed(28)
model = DDP(Next())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(50):
    pair = torch.randint(0, 40, (48, 2), generator=gen)
    following = (pair.sum(1) + 7) % 40
    loss = F.cross_entropy(model(pair), following)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
