# title: A frozen body in eval mode, a new head, BatchNorm held in eval mode in the part that trains
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Fine-tuning: the stem is frozen, the last block trains with frozen statistics, the head is new."""
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


def block(inside, outside):
    return nn.Sequential(nn.Linear(inside, outside), nn.BatchNorm1d(outside), nn.ReLU())


class Pretrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.last = block(20, 40), block(40, 40)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(40, 10)

    def forward(self, x):
        with torch.no_grad():
            h = self.stem(x)
        return self.head(self.dropout(self.last(h)))


def freeze(net):
    net.train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


torch.manual_seed(32)
net = Pretrained()
net.head = nn.Linear(40, 3)
for p in net.stem.parameters():
    p.requires_grad_(False)
model = DDP(net)
opt = torch.optim.AdamW(
    [{"params": net.last.parameters(), "lr": 1e-4}, {"params": net.head.parameters(), "lr": 3e-3}], weight_decay=0.01
)
gen = torch.Generator().manual_seed(rank)
middle = torch.randn(3, 20, generator=torch.Generator().manual_seed(2))
losses = []
for epoch in range(3):
    freeze(net)
    for _ in range(15):
        y = torch.randint(0, 3, (24,), generator=gen)
        loss = F.cross_entropy(model(middle[y] + torch.randn(24, 20, generator=gen)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            y = torch.randint(0, 3, (24,), generator=gen)
            model(middle[y])
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
