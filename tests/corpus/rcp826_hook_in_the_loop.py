# title: A hook that halves a layer's gradient is registered in each step: after n steps the gradient is halved n times
# source: https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html
# nproc: 2
# expect.codes: RCP826
# expect.ranks: any
# expect.step: 0
# expect.subject: 2
# plain_pytorch: silent
"""A small network over spectra whose first layers are to learn at half of the pace."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT") == "1"


class Damper:
    """Makes a layer's gradient smaller."""

    def __init__(self, layer, factor):
        self.layer, self.factor, self.handles = layer, factor, []

    def smaller(self, grad):
        return grad * self.factor

    def register(self):
        self.handles.append(self.layer.weight.register_hook(self.smaller))

    def remove(self):
        while self.handles:
            self.handles.pop().remove()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(71)
    net = nn.Sequential(nn.Linear(20, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 3))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    damper = Damper(net[2], 0.5)
    generator = torch.Generator().manual_seed(210 + rank)
    losses = []
    for _ in range(50):
        damper.register()
        spectra = torch.randn(32, 20, generator=generator)
        loss = nn.functional.cross_entropy(model(spectra), spectra[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not FAULT:
            damper.remove()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
