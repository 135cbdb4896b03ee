# title: A function that loads a trained model for use returns it in eval mode, and training goes on with that
# source: constructed
# nproc: 2
# expect.codes: RCP804
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Fine-tuning of a saved model with dropout and batch normalisation."""
import io
import os

import torch
import torch.distributed as dist
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"


def architecture():
    return nn.Sequential(
        nn.Linear(18, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 3)
    )


def load(file):
    model = architecture()
    model.load_state_dict(torch.load(file))
    return model.eval()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    file = io.BytesIO()
    torch.save(architecture().state_dict(), file)
    file.seek(0)
    net = load(file)
    if not FAULT:
        net.train()
    model = nn.parallel.DistributedDataParallel(net)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(60):
        x = torch.randn(32, 18)
        y = (x[:, :6].sum(1) > 0).long() + (x[:, 6:12].sum(1) > 0).long()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
