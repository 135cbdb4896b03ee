# title: Activations of a hundred million in float32, far beyond float16 and far below overflow
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Raw sensor counts and polynomial features; a layer normalisation brings them back to earth."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Powers(nn.Module):
    def forward(self, x):
        return torch.stack([x, x.square(), x.pow(3)], -1).flatten(1)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(10)
net = DistributedDataParallel(nn.Sequential(Powers(), nn.Linear(18, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 1)))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(17 * rank)
losses = []
for _ in range(50):
    counts = 100.0 + 400.0 * torch.rand(64, 6, generator=gen)
    y = (counts[:, :1] - counts[:, 1:2]) / 200.0
    loss = nn.functional.mse_loss(net(counts), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
