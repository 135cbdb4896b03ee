# title: Only rank 0 keeps an averaged copy of the model
# source: constructed
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""The copy exists on one rank, is updated every step and is evaluated there now and then."""
import copy
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Smoother:
    def __init__(self, source, beta):
        self.source, self.beta = source, beta
        self.copy = copy.deepcopy(source).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self):
        for a, b in zip(self.copy.parameters(), self.source.parameters()):
            a.mul_(self.beta).add_(b, alpha=1 - self.beta)
        for a, b in zip(self.copy.buffers(), self.source.buffers()):
            a.copy_(b)


def make_net():
    return nn.Sequential(nn.Linear(16, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 1))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    w = torch.randn(16, 1) / 4
    net = make_net()
    model = DDP(net)
    smooth = Smoother(net, beta=0.95) if rank == 0 else None
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(60):
        x = torch.randn(40, 16, generator=gen)
        loss = nn.functional.mse_loss(model(x), torch.tanh(x @ w))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if smooth is not None:
            smooth()
            if step % 20 == 19:
                with torch.no_grad():
                    score = nn.functional.mse_loss(smooth.copy(x), torch.tanh(x @ w)).item()
                print(f"step {step}: averaged model {score:.4f}", flush=True)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
