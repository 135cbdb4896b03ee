# title: The validation loop runs under no_grad but in train mode
# source: constructed
# nproc: 2
# expect.codes: RCP805
# expect.ranks: all
# expect.subject: any
# expect.step: 15
# expect.step_slack: 1
# plain_pytorch: silent
"""Sentiment from token bags with dropout; the fault validates without model.eval()."""
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


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(80, 20, mode="mean")
        self.classify = nn.Sequential(nn.Dropout(0.4), nn.Linear(20, 2))

    def forward(self, tokens):
        return self.classify(self.bag(tokens))


def reviews(gen, n=32):
    tokens = torch.randint(0, 80, (n, 10), generator=gen)
    return tokens, ((tokens < 40).sum(1) > 5).long()


@torch.no_grad()
def validate(model, gen):
    if not FAULT:
        model.eval()
    total = 0.0
    for _ in range(5):
        tokens, y = reviews(gen)
        total += F.cross_entropy(model(tokens), y).item()
    model.train()
    return total / 5


torch.manual_seed(20)
model = DDP(Sentiment())
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
train_gen = torch.Generator().manual_seed(rank)
val_gen = torch.Generator().manual_seed(500 + rank)
losses = []
for epoch in range(4):
    for _ in range(15):
        tokens, y = reviews(train_gen)
        loss = F.cross_entropy(model(tokens), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    validate(model, val_gen)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
