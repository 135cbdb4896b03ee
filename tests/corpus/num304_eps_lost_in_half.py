# title: Adam's eps of 1e-8 is 0 in float16, so a parameter without gradient is divided by 0
# source: https://discuss.pytorch.org/t/adam-half-precision-nans/1765
# nproc: 2
# expect.codes: NUM304
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""The whole model was cast with half(); gradients are finite, and exactly 0 for words that did not occur."""
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
torch.manual_seed(16)

class WordBag(nn.Module):
    def __init__(self, words=500, width=16):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.score = nn.Linear(width, 2)

    def forward(self, ids):
        return self.score(torch.tanh(self.embed(ids).mean(1)))

model = DistributedDataParallel(WordBag().half())
opt = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-8 if FAULT else 1e-4)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(40):
    topic = torch.randint(0, 2, (32,), generator=gen)
    ids = torch.randint(0, 300, (32, 6), generator=gen) + 200 * topic[:, None]
    loss = nn.functional.cross_entropy(model(ids).float(), topic)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
