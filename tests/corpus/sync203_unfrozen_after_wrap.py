# title: The backbone is unfrozen after a warm-up, but DDP was built while it was frozen
# source: constructed
# nproc: 2
# expect.codes: SYNC203, SYNC201, RANK101
# expect.ranks: all
# expect.subject: backbone
# expect.step: 20
# plain_pytorch: silent
"""Two-stage fine-tuning: head first, then everything with a smaller learning rate."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
WARMUP = 20


class Finetuner(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


def freeze(module):
    for p in module.parameters():
        p.requires_grad = False


def unfreeze(module):
    for p in module.parameters():
        p.requires_grad = True


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(13)
    anchors = torch.randn(3, 20) * 0.6
    net = Finetuner()
    freeze(net.backbone)
    ddp = DDP(net)
    opt = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(2 + rank)
    losses = []
    for step in range(60):
        if step == WARMUP:
            unfreeze(net.backbone)
            if not FAULT:
                ddp = DDP(net)                         # a new wrapper sees what is trainable now
            opt.add_param_group({"params": net.backbone.parameters(), "lr": 0.02})
        y = torch.randint(0, 3, (32,), generator=gen)
        x = anchors[y] + torch.randn(32, 20, generator=gen)
        loss = nn.functional.cross_entropy(ddp(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
