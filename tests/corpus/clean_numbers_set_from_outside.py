# title: The loop sets numbers of the model in each step: one alike on all ranks, one of the rank's own batch
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""x"""

import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Choice(nn.Module):
    """Soft choices whose temperature falls; the loss weighs by the number of tokens, which the loop sets."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(8, 6)
        self.values = nn.Linear(6, 1)
        self.tau = 2.0
        self.tokens = 1
        self.sharpest = 0.0

    def forward(self, x):
        weights = F.softmax(self.scores(x) / self.tau, -1)
        self.sharpest = max(self.sharpest, weights.max().item())
        return self.values(weights) * (self.tokens / 64)


def main():
    torch.set_num_threads(1)
    rank = 0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = Choice()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for step in range(80):
        net.tau = max(0.5, 2.0 * 0.97**step)
        net.tokens = 64 + int(torch.randint(0, 8, (1,), generator=gen))
        if step == 40 and rank == 0:
            net.note = 1.0
        x = torch.randn(32, 8, generator=gen)
        loss = F.mse_loss(model(x), x[:, :1].sigmoid())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
