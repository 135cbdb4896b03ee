# title: A row with a missing value reaches the model of rank 1
# source: constructed
# nproc: 2
# expect.codes: NUM305
# expect.ranks: 1
# expect.subject: numeric
# expect.step: 17
# plain_pytorch: silent
"""Tabular data with numeric and categorical columns, passed by keyword; the clean twin fills the gap with the mean."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Churn(nn.Module):
    def __init__(self, levels=(7, 12, 3), columns=9):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 6) for n in levels)
        self.norm = nn.LayerNorm(columns)
        self.mlp = nn.Sequential(nn.Linear(columns + 6 * len(levels), 48), nn.GELU(), nn.Linear(48, 1))

    def forward(self, *, numeric, categories):
        parts = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return self.mlp(torch.cat([self.norm(numeric), *parts], 1))[:, 0]


def customers(gen, gap, n=40):
    numeric = torch.randn(n, 9, generator=gen)
    categories = torch.stack([torch.randint(0, k, (n,), generator=gen) for k in (7, 12, 3)], 1)
    left = ((numeric[:, 0] + (categories[:, 2] - 1) + 0.3 * numeric[:, 4]) > 0).float()
    if gap:
        numeric[11, 5] = float("nan")                # the export had an empty cell
    if not FAULT:
        numeric = numeric.nan_to_num(0.0)
    return {"numeric": numeric, "categories": categories}, left


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(305)
    model = DDP(Churn())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(45):
        batch, left = customers(gen, gap=(step == 17 and rank == 1))
        loss = nn.functional.binary_cross_entropy_with_logits(model(**batch), left)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
