# title: The pattern that exempts parameters from weight decay is older on one rank
# source: constructed
# nproc: 2
# expect.codes: RANK104, RANK101
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Both groups have the same settings on both ranks; what differs is which parameters they hold."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 2))
    model = DDP(net)
    exempt = ("bias", "LayerNorm.weight") if FAULT and rank == 1 else ("bias", "1.weight")
    decayed = [p for name, p in net.named_parameters() if not name.endswith(exempt)]
    others = [p for name, p in net.named_parameters() if name.endswith(exempt)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=3e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        x = torch.randn(16, 10, generator=gen)
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
