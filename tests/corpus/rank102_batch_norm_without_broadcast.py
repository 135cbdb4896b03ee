# title: BatchNorm statistics drift apart because the wrapper no longer broadcasts buffers
# source: https://github.com/facebookresearch/maskrcnn-benchmark/issues/692
# nproc: 3
# expect.codes: RANK102
# expect.ranks: any
# expect.subject: running_
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""One-dimensional signals from three sensors with slightly different gain, one sensor on each rank."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class SignalNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.stem = nn.Conv1d(1, 10, 5, stride=2, bias=False)
        self.norm = nn.BatchNorm1d(10)
        self.mix = nn.Conv1d(10, 16, 5, stride=2, bias=False)
        self.norm2 = nn.BatchNorm1d(16)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.norm2(self.mix(x)))
        return self.fc(x.mean(-1))


def read_sensor(gen, gain):
    kind = torch.randint(0, 3, (24,), generator=gen)
    t = torch.linspace(0, 1, 48)
    start = 6.28 * torch.rand(24, 1, generator=gen)
    wave = torch.sin(6.28 * (2 + 3 * kind[:, None]) * t + start)
    return (gain * (wave + 0.3 * torch.randn(24, 48, generator=gen)))[:, None], kind


def run():
    rank = dist.get_rank()
    torch.manual_seed(9)
    net = SignalNet()
    model = DDP(net, broadcast_buffers=False) if FAULT else DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    gen = torch.Generator().manual_seed(1000 + rank)
    losses = []
    for _ in range(50):
        x, kind = read_sensor(gen, gain=1.0 + 0.1 * rank)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), kind)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    stats = zlib.crc32(b"".join(b.numpy().tobytes() for b in net.buffers()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"buffers={stats:08x}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run()
    time.sleep(0.3)
    dist.destroy_process_group()
