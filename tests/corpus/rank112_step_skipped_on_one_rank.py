# title: A rank that dislikes its loss skips optimizer.step on its own
# source: https://github.com/NVIDIA-NeMo/Automodel/pull/2468
# nproc: 4
# expect.codes: RANK112, RANK101
# expect.ranks: 1
# expect.subject: any
# expect.step: 18
# expect.step_slack: 1
# plain_pytorch: silent
"""Denoising of small patches; at iteration 18 the batch of rank 1 contains a saturated exposure."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 12, 3, padding=1)
        self.middle = nn.Conv2d(12, 12, 3, padding=1)
        self.up = nn.Conv2d(12, 1, 3, padding=1)

    def forward(self, x):
        h = torch.relu(self.down(x))
        h = h + torch.relu(self.middle(h))
        return x + self.up(h)


def patches(gen, n=12):
    ramp = torch.linspace(-1, 1, 10)
    a, b = torch.randn(2, n, 1, 1, generator=gen)
    clean = (a * ramp[:, None] + b * ramp[None, :])[:, None]
    return clean + 0.5 * torch.randn(clean.shape, generator=gen), clean


def any_rank(flag):
    vote = torch.tensor([float(flag)])
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return vote.item() > 0


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DDP(Denoiser())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(640 + rank)
    losses = []
    for it in range(50):
        noisy, clean = patches(gen)
        if it == 18 and rank == 1:
            noisy[0] += 6.0
        loss = nn.functional.mse_loss(model(noisy), clean)
        suspicious = loss.item() > 2.0
        if not FAULT and any_rank(suspicious):
            continue
        opt.zero_grad()
        loss.backward()
        if not suspicious:
            opt.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"steps={len(losses)}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
