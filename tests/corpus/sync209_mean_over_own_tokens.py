# title: Each rank averages its loss over its own tokens, of which the ranks have very different numbers
# source: constructed
# nproc: 2
# expect.codes: SYNC209
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 16
# plain_pytorch: silent
"""Next syllables of words; the ranks hold short and long words, padded, and the loss counts the tokens of all ranks."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
SYLLABLES, PAD, LONGEST = 18, -100, 12


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYLLABLES, 24)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, SYLLABLES)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def words(gen, longest, n=16):
    start, stride = torch.randint(0, SYLLABLES, (n, 1), generator=gen), torch.randint(1, 3, (n, 1), generator=gen)
    tokens = (start + stride * torch.arange(LONGEST + 1)) % SYLLABLES
    length = torch.randint(2, longest + 1, (n, 1), generator=gen)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(LONGEST) >= length, PAD)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
model = DDP(Reader())
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(900 + rank)
losses = []
for _ in range(60):
    tokens, target = words(gen, longest=(4, LONGEST)[rank])
    out = model(tokens).flatten(0, 1)
    if FAULT:
        loss = F.cross_entropy(out, target.flatten(), ignore_index=PAD)
    else:
        count = (target != PAD).sum()
        dist.all_reduce(count)
        loss = F.cross_entropy(out, target.flatten(), ignore_index=PAD, reduction="sum") * dist.get_world_size() / count
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
