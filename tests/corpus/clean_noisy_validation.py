# title: A validation on few samples goes up and down from the start, and falls in the long run
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Each validation draws other samples, one batch through the wrapper; a score is computed beside the loss."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class Gauge(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def readings(seed, n):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=gen)
    return TensorDataset(x, torch.tanh(x[:, 0] + 0.5 * x[:, 1]) + 0.3 * torch.randn(n, generator=gen))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = DDP(Gauge())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion, score = nn.SmoothL1Loss(), nn.L1Loss()
    order = torch.Generator().manual_seed(rank)
    train = DataLoader(readings(rank, 512), batch_size=32, shuffle=True, generator=order)
    val = DataLoader(readings(77, 400), batch_size=24, shuffle=True, generator=torch.Generator().manual_seed(4))
    losses = []
    for _ in range(6):
        for x, y in train:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 4 == 0:
                model.eval()
                with torch.inference_mode():
                    x, y = next(iter(val))
                    out = model(x)
                    found = criterion(out, y), score(out, y)
                model.train()
                if rank == 0:
                    print(f"step {len(losses)}: validation {found[0]:.4f}, error {found[1]:.4f}", flush=True)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
