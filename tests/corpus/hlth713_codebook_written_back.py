# title: After each step the codebook is copied back from the average that it should feed
# source: constructed
# nproc: 2
# expect.codes: HLTH713
# expect.ranks: all
# expect.subject: codes
# expect.step: 0
# expect.step_slack: 4
# plain_pytorch: silent
"""Vector quantisation with a moving average of the codes."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(10, 6)
        self.codes = nn.Parameter(torch.randn(16, 6))
        self.decode = nn.Linear(6, 10)

    def forward(self, x):
        z = self.encode(x)
        weight = torch.softmax(-torch.cdist(z, self.codes), -1)
        return self.decode(z + weight @ self.codes)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = Quantiser()
    model = DDP(net)
    average = net.codes.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        x = torch.randn(48, 10, generator=gen)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            if FAULT:
                net.codes.copy_(average)
            average.lerp_(net.codes, 0.01)
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
