# title: A view puts time first where a transpose was meant: rows of different samples are mixed
# source: https://docs.pytorch.org/docs/stable/generated/torch.Tensor.view.html
# nproc: 2
# options: --every-step
# expect.codes: RCP825
# expect.ranks: all
# expect.step: 3
# expect.step_slack: 2
# expect.location: rcp825_view_for_transpose.py:36
# plain_pytorch: silent
"""A recurrent network over the codes of a heartbeat says whether it is regular."""
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


class Beat(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.codes, self.states, self.kind = nn.Embedding(10, width), nn.GRU(width, 32), nn.Linear(32, 3)

    def forward(self, beat):
        codes = self.codes(beat)
        if FAULT:
            codes = codes.view(beat.shape[1], beat.shape[0], -1)
        else:
            codes = codes.transpose(0, 1)
        states, _ = self.states(codes)
        return self.kind(states[-1])


torch.manual_seed(4)
model = DDP(Beat())
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(30 + rank)
losses = []
for step in range(80):
    beat = torch.randint(0, 10, (20, 12), generator=gen)
    kind = beat[:, -2:].sum(1) % 3
    loss = F.cross_entropy(model(beat), kind)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    time.sleep(0.002)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} loss={sum(losses[-10:]) / 10:.4f} crc={crc:08x}", flush=True)
dist.destroy_process_group()
