# title: Post-local SGD: after a warm-up the ranks step alone and are averaged every fourth step
# source: https://pytorch.org/docs/stable/_modules/torch/distributed/optim/post_localSGD_optimizer.html
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Parameters differ between two averagings, as the registered hook and optimizer declare."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

WARMUP, PERIOD, STEPS = 16, 4, 61


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone = dist.new_group([0]), dist.new_group([1])
    torch.manual_seed(9)
    slope = torch.randn(11, 1) / 3
    model = DistributedDataParallel(nn.Sequential(nn.Linear(11, 32), nn.Tanh(), nn.Linear(32, 1)))
    state = local_sgd.PostLocalSGDState(process_group=None, subgroup=alone[rank], start_localSGD_iter=WARMUP)
    model.register_comm_hook(state, local_sgd.post_localSGD_hook)
    opt = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=0.1),
        averager=PeriodicModelAverager(period=PERIOD, warmup_steps=WARMUP))
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(40, 11, generator=gen)
        loss = nn.functional.mse_loss(model(x), (x @ slope).sin())
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
