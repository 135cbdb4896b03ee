# title: A compression hook sums float16 gradients over the ranks and divides afterwards: the sum overflows
# source: https://github.com/pytorch/pytorch/pull/59522
# nproc: 4
# expect.codes: NUM309
# expect.ranks: any
# expect.subject: any
# expect.step: 10
# plain_pytorch: silent
"""No rank exceeds 65504 on its own; four of them do together when the market jumps in step 10."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def half_hook(group, bucket):
    sent = bucket.buffer()
    if FAULT:
        sent = sent.half()
    else:
        sent = sent.div(dist.get_world_size()).half()
    work = dist.all_reduce(sent, async_op=True).get_future()

    def decompress(future):
        mean = bucket.buffer()
        mean.copy_(future.value()[0])
        return mean.div_(dist.get_world_size()) if FAULT else mean

    return work.then(decompress)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(309)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    model.register_comm_hook(None, half_hook)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(40):
        x = torch.randn(64, 8, generator=gen)
        y = (x[:, :1] + x[:, 1:2].abs()) * 30.0
        if step == 10:
            y = y + 400.0
        loss = (model(x) - y).square().sum()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        opt.step()
        losses.append(loss.item() / 64)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
