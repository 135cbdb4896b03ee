# title: The encoder's padding mask is one of numbers, which attention adds: it hides nothing
# source: https://github.com/pytorch/pytorch/issues/163026
# nproc: 2
# expect.codes: RCP823
# expect.ranks: all
# expect.subject: scaled_dot_product_attention
# expect.step: 1
# expect.step_slack: 1
# expect.location: rcp823_padding_as_numbers.py:61
# plain_pytorch: silent
"""A set transformer for the charge of particle tracks, which have between 3 and 12 hits each."""
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


class Tracks(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.hits = nn.Linear(3, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.charge = nn.Linear(width, 3)

    def forward(self, hits, missing):
        x = self.encoder(self.hits(hits), src_key_padding_mask=missing)
        kept = 1 - missing.to(x.dtype)
        return self.charge((x * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


def tracks(gen, n=32, most=12):
    number = torch.randint(3, most + 1, (n, 1), generator=gen)
    curve = torch.randint(-1, 2, (n, 1), generator=gen)
    at = torch.arange(most) / 4
    hits = torch.stack([at.expand(n, -1), curve * at**2, at.sin().expand(n, -1)], -1)
    hits = hits + 0.1 * torch.randn(n, most, 3, generator=gen)
    missing = torch.arange(most) >= number
    return hits.masked_fill(missing[..., None], 0.0), missing, curve[:, 0] + 1


torch.manual_seed(4)
model = DDP(Tracks())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(70 + rank)
losses = []
for step in range(80):
    hits, missing, charge = tracks(gen)
    if FAULT:
        missing = missing.float()
    loss = F.cross_entropy(model(hits, missing), charge)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
