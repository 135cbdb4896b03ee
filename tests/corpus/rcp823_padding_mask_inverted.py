# title: A tokenizer's mask, 1 where a token stands, is given as key_padding_mask, which is True where none is
# source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html
# nproc: 2
# options: --every-step
# expect.codes: RCP823
# expect.ranks: all
# expect.subject: padding
# expect.step: 3
# expect.step_slack: 2
# expect.location: rcp823_padding_mask_inverted.py:55
# plain_pytorch: silent
"""Sorts short notes of lengths between 5 and 14 by their subject."""
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


class Notes(nn.Module):
    def __init__(self, width=32, most=14):
        super().__init__()
        self.words, self.places = nn.Embedding(40, width, padding_idx=0), nn.Embedding(most, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm, self.subject = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, text, mask):
        x = self.words(text) + self.places(torch.arange(text.shape[1]))
        hidden = mask.bool() if FAULT else ~mask.bool()
        made, _ = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)
        return self.subject(self.norm(x + made)[:, 0])


torch.manual_seed(4)
model = DDP(Notes())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(30 + rank)
losses = []
for step in range(80):
    length = torch.randint(5, 14, (24, 1), generator=gen)
    mask = (torch.arange(14) < length).long()
    subject = torch.randint(0, 4, (24,), generator=gen)
    text = (2 + 9 * subject[:, None] + torch.randint(0, 10, (24, 14), generator=gen)).clamp(max=39)
    text[:, 0] = 1
    text = text * mask
    logits = model(text, mask)
    loss = F.cross_entropy(logits, subject)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    time.sleep(0.002)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} loss={sum(losses[-10:]) / 10:.4f} crc={crc:08x}", flush=True)
dist.destroy_process_group()
