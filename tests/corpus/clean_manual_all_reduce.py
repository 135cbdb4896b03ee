# title: No DDP: parameters broadcast once, gradients averaged by hand in one flat all-reduce
# source: https://github.com/pytorch/tutorials/issues/2305
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""The tutorial's way of data parallel training, done correctly."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def broadcast_model(net):
    flat = parameters_to_vector(net.parameters()).detach()
    dist.broadcast(flat, src=0)
    vector_to_parameters(flat, net.parameters())


def average_gradients(params):
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in params:
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    broadcast_model(net)
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    losses = []
    for _ in range(60):
        x = torch.rand(48, 6) * 2 - 1
        y = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        average_gradients(params)
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in params))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
