# title: PowerSGD compresses gradients to low rank, with error feedback
# source: https://pytorch.org/docs/stable/ddp_comm_hooks
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The reduced gradient is an approximation of the mean on purpose; all ranks get the same one."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(53)
    teacher = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)
    model = DDP(nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4)))
    state = power.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    model.register_comm_hook(state, power.powerSGD_hook)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x = torch.randn(48, 32, generator=gen)
        loss = nn.functional.mse_loss(model(x), 3 * teacher(x))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
