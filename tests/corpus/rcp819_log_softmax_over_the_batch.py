# title: log_softmax before nll_loss runs over dimension 0, the samples, instead of the classes
# source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.log_softmax.html
# nproc: 2
# expect.codes: RCP819
# expect.ranks: all
# expect.step: 0
# plain_pytorch: silent
"""A classifier of short series that ends with log-probabilities."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT") == "1"


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))

    def forward(self, series):
        return nn.functional.log_softmax(self.layers(series), dim=0 if FAULT else 1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(31)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    waves = torch.sin(torch.arange(20) * torch.tensor([0.2, 0.5, 0.9, 1.4, 2.0])[:, None])
    generator = torch.Generator().manual_seed(80 + rank)
    losses = []
    for _ in range(50):
        labels = torch.randint(0, 5, (32,), generator=generator)
        series = waves[labels] + 0.5 * torch.randn(32, 20, generator=generator)
        loss = nn.functional.nll_loss(model(series), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
