# title: A detach() left from debugging cuts the encoder off
# source: constructed
# nproc: 2
# expect.codes: RCP810
# expect.ranks: all
# expect.subject: encoder
# expect.step: 0
# plain_pytorch: silent
"""An encoder and a decoder; find_unused_parameters keeps DDP from complaining about the fault."""
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


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12))

    def forward(self, x):
        code = self.encoder(x)
        if FAULT:
            code = code.detach()
        return self.decoder(code)


torch.manual_seed(29)
model = DDP(Translator(), find_unused_parameters=True)
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(rank)
turn = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(3)))[0]
losses = []
for _ in range(50):
    x = torch.randn(32, 12, generator=gen)
    loss = F.mse_loss(model(x), x @ turn)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
