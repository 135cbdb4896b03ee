# title: BatchNorm with DDP's defaults: statistics differ after each step and are overwritten at the next forward
# source: https://github.com/pytorch/pytorch/issues/63916
# nproc: 4
# expect.codes: none
# plain_pytorch: silent
"""Different between steps by design, because rank 0's buffers count."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, bias=False), nn.BatchNorm2d(cout), nn.ReLU())


def spots(gen, n=20):
    y = torch.randint(0, 4, (n,), generator=gen)
    img = torch.randn(n, 1, 10, 10, generator=gen)
    rows, cols = y.div(2, rounding_mode="floor"), y % 2
    for k in range(n):
        r, c = int(rows[k]) * 5, int(cols[k]) * 5
        img[k, 0, r:r + 5, c:c + 5] += 1.2
    return img, y


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(20)
    net = nn.Sequential(conv_block(1, 8), conv_block(8, 12), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 4))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60, eta_min=0.01)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        img, y = spots(gen)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(img), y)
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
