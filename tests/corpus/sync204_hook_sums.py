# title: A communication hook sums the buckets and forgets to divide
# source: https://github.com/pytorch/pytorch/pull/42400
# nproc: 4
# expect.codes: SYNC204
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Half-precision transport of gradients; all ranks agree, on a gradient that is four times too large."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class HalfTransport:
    """State of the hook: what to send and how to undo it."""

    def __init__(self, group):
        self.group = group
        self.divisor = 1 if FAULT else group.size()
        self.sent = 0


def send_halves(state, bucket):
    original = bucket.buffer()
    compact = (original / state.divisor).to(torch.bfloat16)
    state.sent += compact.numel() * compact.element_size()
    work = dist.all_reduce(compact, group=state.group, async_op=True)

    def restore(future):
        return original.copy_(future.value()[0])

    return work.get_future().then(restore)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 24, batch_first=True)
        self.forecast = nn.Linear(24, 1)

    def forward(self, x):
        return self.forecast(self.gru(x)[0][:, -1])


def series(gen, n=32):
    start = 6.28 * torch.rand(n, 1, generator=gen)
    speed = 0.3 + 0.3 * torch.rand(n, 1, generator=gen)
    wave = torch.sin(start + speed * torch.arange(13))
    window = wave[:, :12]
    x = torch.stack([window, window.diff(dim=1, prepend=window[:, :1]), window.square()], -1)
    return x, wave[:, 12:]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(70)
    model = DistributedDataParallel(Sequence())
    model.register_comm_hook(HalfTransport(dist.group.WORLD), send_halves)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x, y = series(gen)
        loss = nn.functional.mse_loss(model(x), y)
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
