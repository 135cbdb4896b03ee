# title: torch's own hook that sends gradients in float16
# source: https://pytorch.org/docs/stable/ddp_comm_hooks
# nproc: 4
# expect.codes: none
# plain_pytorch: silent
"""A denoising score network; the mean gradient is exact only up to float16 rounding."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks as hooks
from torch.nn.parallel import DistributedDataParallel as DDP


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 40)
        self.inp = nn.Linear(2, 40)
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 2))

    def forward(self, x, t):
        return self.out(self.inp(x) + self.time(t))


def crescent(gen, n=64):
    a = 3.14159 * torch.rand(n, 1, generator=gen)
    return torch.cat([a.cos(), a.sin()], 1)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(95)
model = DDP(Score())
hooks.register_ddp_comm_hook(hooks.DDPCommHookType.FP16_COMPRESS, model)
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(50):
    x = crescent(gen)
    t = torch.rand(64, 1, generator=gen)
    noise = torch.randn(64, 2, generator=gen)
    loss = nn.functional.mse_loss(model((1 - t) * x + t * noise, t), noise - x)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
