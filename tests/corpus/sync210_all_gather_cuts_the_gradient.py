# title: Negatives of a contrastive loss are collected with all_gather, which has no backward
# source: https://github.com/facebookresearch/SLIP/issues/31
# nproc: 2
# expect.codes: SYNC210
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Two encoders, local queries against everyone's keys; the keys' share of the gradient is lost."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(30, 48), nn.ReLU(), nn.Linear(48, 16))
        self.text = nn.Sequential(nn.Linear(18, 48), nn.ReLU(), nn.Linear(48, 16))
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        return F.normalize(self.image(image)), F.normalize(self.text(text)), self.log_scale.exp()


def collect(z):
    parts = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z)
    return torch.cat(parts)


class Collect(torch.autograd.Function):
    """The same with a backward: every rank gets back the gradients that all ranks hold for its rows."""

    @staticmethod
    def forward(ctx, z):
        return collect(z)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gather(z):
    return collect(z) if FAULT else Collect.apply(z)


def contrastive(image, text, scale, rank):
    labels = torch.arange(len(image)) + rank * len(image)
    by_image = F.cross_entropy(scale * image @ gather(text).T, labels)
    by_text = F.cross_entropy(scale * text @ gather(image).T, labels)
    return (by_image + by_text) / 2


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(97)
    to_image, to_text = torch.randn(8, 30), torch.randn(8, 18)
    model = DDP(TwoTowers())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        meaning = torch.randn(24, 8, generator=gen)
        image = meaning @ to_image / 3 + 0.2 * torch.randn(24, 30, generator=gen)
        text = meaning @ to_text / 3 + 0.2 * torch.randn(24, 18, generator=gen)
        loss = contrastive(*model(image, text), rank)
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
