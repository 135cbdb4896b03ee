# title: The training step calls the module that was wrapped instead of the wrapper
# source: constructed
# nproc: 2
# expect.codes: SYNC202
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.location: raw_in_trainer.py:48
# plain_pytorch: silent
"""A trainer that keeps both, the plain network for saving and the wrapped one for training."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Config:
    fault = os.environ.get("FAULT") == "1"
    lr = 3e-3
    steps = 60
    batch = 24


class WineQuality(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(11, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 1))

    def forward(self, features):
        return self.layers(features).squeeze(-1)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(14)
        self.network = WineQuality()
        self.ddp_network = DistributedDataParallel(self.network)
        self.optimizer = torch.optim.AdamW(self.ddp_network.parameters(), lr=cfg.lr)
        self.data = torch.Generator().manual_seed(500 + self.rank)

    def training_step(self, features, quality):
        if self.cfg.fault:
            predicted = self.network(features)
        else:
            predicted = self.ddp_network(features)
        return nn.functional.huber_loss(predicted, quality)

    def run(self):
        for _ in range(self.cfg.steps):
            features = torch.randn(self.cfg.batch, 11, generator=self.data)
            quality = features[:, :3].prod(1) + features[:, 4]
            self.optimizer.zero_grad()
            loss = self.training_step(features, quality)
            loss.backward()
            self.optimizer.step()
        print(f"rank={self.rank} loss={loss.item():.4f}", flush=True)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer(Config()).run()
