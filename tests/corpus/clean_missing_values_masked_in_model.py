# title: Missing laboratory values are NaN in the batch, and the model masks them itself
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A third of the inputs is NaN in every step, on every rank; no module's output, loss or gradient ever is."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Impute(nn.Module):
    """Puts a learned value where none was measured, and tells the network where."""

    def __init__(self, columns):
        super().__init__()
        self.default = nn.Parameter(torch.zeros(columns))

    def forward(self, values):
        missing = torch.isnan(values)
        return torch.cat([torch.where(missing, self.default, values), missing.float()], dim=1)


def patients(gen, weight, n=40):
    values = torch.randn(n, 8, generator=gen)
    ill = (values @ weight > 0).float()
    values[torch.rand(n, 8, generator=gen) < 0.33] = float("nan")
    return values, ill


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(303)
    weight = torch.randn(8)
    model = DDP(nn.Sequential(Impute(8), nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 1), nn.Flatten(0)))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank + 6)
    losses = []
    for _ in range(50):
        values, ill = patients(gen, weight)
        loss = nn.functional.binary_cross_entropy_with_logits(model(values), ill)
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
