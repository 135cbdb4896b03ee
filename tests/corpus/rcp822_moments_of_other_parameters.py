# title: The optimizer of the resumed run has its parameters in another order than the one that was saved
# source: https://github.com/pytorch/pytorch/issues/1489
# nproc: 2
# expect.codes: RCP822
# expect.ranks: any
# expect.subject: layers
# expect.step: 30
# plain_pytorch: silent
"""A model of wind speeds that is trained on after a restart within the job."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Wind(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.speed = nn.Linear(16, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.speed(x)


def named_of(model, order):
    return sorted(model.named_parameters(), key=lambda pair: pair[0], reverse=order == "last first")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gen = torch.Generator().manual_seed(870 + rank)
    losses, saved = [], None
    for part in range(2):
        torch.manual_seed(87)
        wind = Wind()
        if saved is not None:
            wind.load_state_dict(saved["model"])
        ddp = DistributedDataParallel(wind)
        opt = torch.optim.Adam(named_of(wind, "last first" if part and FAULT else "first first"), lr=2e-3)
        if saved is not None:
            opt.load_state_dict(saved["optimizer"])
        for _ in range(30):
            x = torch.randn(32, 16, generator=gen)
            loss = nn.functional.mse_loss(ddp(x), x[:, :4].square().sum(1, keepdim=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        saved = {"model": {name: value.clone() for name, value in wind.state_dict().items()}, "optimizer": opt.state_dict()}
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
