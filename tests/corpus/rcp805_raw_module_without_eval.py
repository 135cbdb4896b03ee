# title: The inner module is validated under no_grad, in train mode
# source: constructed
# nproc: 2
# expect.codes: RCP805
# expect.ranks: all
# expect.subject: any
# expect.step: 12
# expect.step_slack: 1
# plain_pytorch: silent
"""Small images with BatchNorm and dropout; the validation goes around the wrapper and forgets model.eval()."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 3))

    def forward(self, x):
        return self.classify(self.features(x))


def images(gen, n=32):
    y = torch.randint(0, 3, (n,), generator=gen)
    x = 0.4 * torch.randn(n, 1, 8, 8, generator=gen)
    for i, kind in enumerate(y.tolist()):
        x[i, 0, :, ::2] += kind == 0
        x[i, 0, ::2] += kind == 1
        x[i, 0, ::2, ::2] += 2 * (kind == 2)
    return x, y


class Trainer:
    def __init__(self):
        self.rank = dist.get_rank()
        torch.manual_seed(31)
        self.model = DDP(Digits())
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        torch.manual_seed(310 + self.rank)
        self.gen = torch.Generator().manual_seed(self.rank)
        val_gen = torch.Generator().manual_seed(900 + self.rank)
        self.held_out = [images(val_gen) for _ in range(5)]

    @torch.inference_mode()
    def validate(self):
        net = self.model.module
        if not FAULT:
            net.eval()
        found = [self.criterion(net(x), y).item() for x, y in self.held_out]
        net.train()
        return sum(found) / len(found)

    def fit(self):
        losses = []
        for step in range(60):
            x, y = images(self.gen)
            loss = self.criterion(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            if step % 12 == 11:
                print(f"rank {self.rank}, step {step}: {self.validate():.4f}", flush=True)
        return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer()
    losses = trainer.fit()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()))
    print(f"RESULT rank={trainer.rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
