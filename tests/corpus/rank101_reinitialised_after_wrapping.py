# title: Weights are drawn again after DDP has broadcast them, with a seed per rank
# source: constructed
# nproc: 2
# expect.codes: RANK101
# expect.ranks: any
# expect.subject: weight
# expect.step: 0
# expect.phase: init, outside-optimizer
# plain_pytorch: silent
"""A small convnet whose custom initialisation runs behind the wrapper."""
import os
import time
import zlib

import torch
from torch import distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


def kaiming(module):
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)


def bars(n, gen):
    """Vertical bars are class 0, horizontal bars are class 1."""
    y = torch.randint(0, 2, (n,), generator=gen)
    pos = torch.randint(0, 8, (n,), generator=gen)
    img = 0.4 * torch.randn(n, 1, 8, 8, generator=gen)
    for i in range(n):
        if y[i]:
            img[i, 0, pos[i]] += 1.5
        else:
            img[i, 0, :, pos[i]] += 1.5
    return img, y


torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK = dist.get_rank()
torch.manual_seed(200 + RANK)          # noise and dropout are meant to differ between ranks

cnn = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 2))
if not FAULT:
    cnn.apply(kaiming)
ddp = DistributedDataParallel(cnn)
if FAULT:
    ddp.apply(kaiming)

sgd = optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
stream = torch.Generator().manual_seed(RANK)
seen = []
for _ in range(50):
    image, target = bars(32, stream)
    sgd.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(ddp(image), target)
    loss.backward()
    sgd.step()
    seen.append(loss.item())

crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
print(f"RESULT rank={RANK} first={seen[0]:.4f} final={sum(seen[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
