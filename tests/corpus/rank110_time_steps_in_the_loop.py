# title: Noise and time steps are drawn in the loop under one seed, so all ranks train on the same ones
# source: constructed
# nproc: 2
# expect.codes: RANK110
# expect.ranks: all
# expect.subject: torch
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""A diffusion model of points on a ring, whose loop makes the noisy points; a DistributedSampler gives each rank its own."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"
STEPS = 100


class Eps(nn.Module):
    def __init__(self):
        super().__init__()
        self.when = nn.Embedding(STEPS, 16)
        self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.when(t)], 1))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    angle = 6.2832 * torch.rand(1024, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    torch.manual_seed(12)
    model = DDP(Eps())
    if not FAULT:
        torch.manual_seed(12 + rank)
    alpha = torch.cumprod(1 - torch.linspace(1e-3, 0.05, STEPS), 0)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            t = torch.randint(0, STEPS, (len(x),))
            noise = torch.randn_like(x)
            a = alpha[t].unsqueeze(1)
            loss = nn.functional.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
