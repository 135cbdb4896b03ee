# title: A population: each rank trains a model of its own at its own rate, and the worst takes over the best now and then
# source: https://arxiv.org/abs/1711.09846
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""No DDP on purpose. Models, settings and what is copied between ranks are one decision: one warning at most."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn


def exploit(net, opt, score):
    scores = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(scores, score)
    order = torch.stack(scores).argsort().tolist()
    for p in net.parameters():
        best = p.detach().clone()
        dist.broadcast(best, order[0])
        if dist.get_rank() == order[-1]:
            p.data.copy_(best)
    if dist.get_rank() == order[-1]:
        opt.param_groups[0]["lr"] *= 1.25


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(90 + rank)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3 * (1 + rank))
    gen = torch.Generator().manual_seed(rank)
    truth = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(60):
        x = torch.randn(24, 10, generator=gen)
        loss = nn.functional.cross_entropy(net(x), (x @ truth).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if step % 15 == 14:
            exploit(net, opt, loss.detach())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
