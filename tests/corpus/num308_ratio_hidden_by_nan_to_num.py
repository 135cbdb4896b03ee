# title: A ratio of two counters is 0/0 and nan_to_num hides it behind the value of a real customer
# source: constructed
# nproc: 2
# expect.codes: NUM308
# expect.ranks: 1
# expect.subject: any
# expect.module: inputs.ratios
# expect.op: div
# expect.location: num308_ratio_hidden_by_nan_to_num.py:30
# expect.step: 8
# plain_pytorch: silent
"""The features have no parameters before them, so loss and gradients are finite and nobody notices."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Ratios(nn.Module):
    def forward(self, counts):
        opened, sent = counts[:, :3], counts[:, 3:]
        if not FAULT:
            sent = sent.clamp_min(1.0)
        return opened / sent


class Inputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.ratios = Ratios()

    def forward(self, counts):
        rates = self.ratios(counts)
        return torch.cat([torch.nan_to_num(rates, nan=0.0, posinf=1.0), counts.log1p()], 1)


class Mailing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = Inputs()
        self.answer = nn.Sequential(nn.Linear(9, 40), nn.SiLU(), nn.Linear(40, 1))

    def forward(self, counts):
        return self.answer(self.inputs(counts)).flatten()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(308)
    model = DDP(Mailing())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(12 + rank)
    losses = []
    for step in range(40):
        sent = torch.randint(1, 20, (48, 3), generator=gen).float()
        opened = (sent * torch.rand(48, 3, generator=gen)).floor()
        bought = (opened[:, 0] / sent[:, 0] > 0.5).float()
        if step >= 8 and rank == 1:
            sent[5] = opened[5] = 0.0                # from now on customers without any letter are in the table
        loss = nn.functional.binary_cross_entropy_with_logits(model(torch.cat([opened, sent], 1)), bought)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
