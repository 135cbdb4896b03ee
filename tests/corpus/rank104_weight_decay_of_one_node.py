# title: One node runs with an old configuration file, so its weight decay differs
# source: constructed
# nproc: 3
# expect.codes: RANK104, RANK101
# expect.ranks: 1
# expect.subject: weight_decay
# expect.step: 0
# plain_pytorch: silent
"""Two parameter groups, one with and one without decay; the configuration is read by every process."""
import json
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
CURRENT = '{"lr": 0.005, "weight_decay": 0.01, "betas": [0.9, 0.98], "hidden": 56}'
OUTDATED = '{"lr": 0.005, "weight_decay": 0.1, "betas": [0.9, 0.98], "hidden": 56}'


def read_config(rank):
    return json.loads(OUTDATED if FAULT and rank == 1 else CURRENT)


def make_optimizer(model, cfg):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": cfg["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
        lr=cfg["lr"], betas=tuple(cfg["betas"]))


class Mixer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(20)
        self.up = nn.Linear(20, hidden)
        self.gate = nn.Linear(20, hidden)
        self.down = nn.Linear(hidden, 5)

    def forward(self, x):
        x = self.norm(x)
        return self.down(self.up(x) * torch.sigmoid(self.gate(x)))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cfg = read_config(rank)
    torch.manual_seed(23)
    prototypes = torch.randn(5, 20)
    model = DistributedDataParallel(Mixer(cfg["hidden"]))
    optimizer = make_optimizer(model, cfg)
    rng = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        y = torch.randint(0, 5, (40,), generator=rng)
        x = prototypes[y] + 1.2 * torch.randn(40, 20, generator=rng)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
