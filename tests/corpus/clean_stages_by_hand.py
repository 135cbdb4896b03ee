# title: A pipeline by hand: each rank trains one stage, activations and their gradients are sent
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""No DDP on purpose. The stages' parameters have the same names and other shapes."""
import time

import torch
import torch.distributed as dist
from torch import nn


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(10, 24), nn.Tanh()) if rank == 0 else nn.Sequential(nn.Linear(24, 4))
    opt = torch.optim.SGD(stage.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(7)
    truth = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    loss = None
    for _ in range(60):
        x = torch.randn(24, 10, generator=gen)
        opt.zero_grad()
        if rank == 0:
            sent = stage(x)
            dist.send(sent.detach(), 1)
            grad = torch.empty_like(sent)
            dist.recv(grad, 1)
            sent.backward(grad)
        else:
            received = torch.empty(24, 24)
            dist.recv(received, 0)
            received.requires_grad_()
            loss = nn.functional.cross_entropy(stage(received), (x @ truth).argmax(1))
            loss.backward()
            dist.send(received.grad, 0)
        opt.step()
    print(f"RESULT rank={rank} final={float('nan') if loss is None else loss.item():.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
