# title: LBFGS evaluates its closure several times within one step
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Several forwards, backwards and reductions per optimizer step, and the closure clears the gradients."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(35)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 1)))
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2, history_size=8)
    gen = torch.Generator().manual_seed(rank)
    x = torch.rand(200, 4, generator=gen) * 2 - 1              # this rank's half of the table
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    losses = []

    def closure():
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return mean_over_ranks(loss)                           # LBFGS must decide alike on all ranks

    for _ in range(40):
        losses.append(opt.step(closure).item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
