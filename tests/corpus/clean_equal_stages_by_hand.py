# title: A pipeline by hand whose stages are alike: each rank trains one block of the same shape
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""No DDP on purpose. Names and shapes of the stages are the same: what shows is that they send to each other."""
import time

import torch
import torch.distributed as dist
from torch import nn


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    opt = torch.optim.Adam(stage.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(7)
    truth = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    loss = None
    for _ in range(60):
        parts = torch.randn(2, 24, 12, generator=gen)
        opt.zero_grad()
        for x in parts:
            if rank == 0:
                sent = stage(x)
                dist.isend(sent.detach(), 1).wait()
                grad = torch.empty_like(sent)
                dist.irecv(grad, 1).wait()
                sent.backward(grad)
            else:
                received = torch.empty(24, 12)
                dist.irecv(received, 0).wait()
                received.requires_grad_()
                loss = nn.functional.mse_loss(stage(received), torch.tanh(x @ truth)) / len(parts)
                loss.backward()
                dist.isend(received.grad, 0).wait()
        opt.step()
    print(f"RESULT rank={rank} final={float('nan') if loss is None else loss.item():.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
