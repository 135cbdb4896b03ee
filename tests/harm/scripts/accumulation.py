import contextlib

import torch
from common import batches, finish, report, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank = setup(2)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 5))
    ddp = DDP(model, gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[3].parameters()}], lr=3e-3, amsgrad=True
    )
    losses = []
    for step, (x, y) in enumerate(batches(rank, 40, 8, 16, classes=5)):
        last = step % 4 == 3
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = F.cross_entropy(ddp(x), y) / 4
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        losses.append(loss.detach())
    report([model], [optimizer], losses)


main()
finish()
