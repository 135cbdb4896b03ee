# title: After a restart only rank 0 loads the state of the scaler
# source: constructed
# nproc: 2
# expect.codes: RANK109
# expect.ranks: any
# expect.subject: any
# expect.step: 20
# expect.step_slack: 1
# plain_pytorch: silent
"""A job that saves everything at step 20 and goes on in the same process as if it had been restarted."""
import copy
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


def build():
    torch.manual_seed(17)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=8)
    return ddp, optimizer, scaler


def train(ddp, optimizer, scaler, gen, rule, steps):
    for _ in range(steps):
        x = torch.randn(32, 16, generator=gen)
        y = (x @ rule).argmax(1)
        with torch.autocast("cpu", dtype=torch.float16):
            out = ddp(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gen = torch.Generator().manual_seed(rank)
    rule = torch.randn(16, 4, generator=torch.Generator().manual_seed(99))
    ddp, optimizer, scaler = build()
    first = train(ddp, optimizer, scaler, gen, rule, 20)
    saved = copy.deepcopy({"m": ddp.module.state_dict(), "o": optimizer.state_dict(), "s": scaler.state_dict()})

    ddp.module.load_state_dict(saved["m"])
    optimizer.load_state_dict(saved["o"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=8)
    if rank == 0 or not FAULT:
        scaler.load_state_dict(saved["s"])
    last = train(ddp, optimizer, scaler, gen, rule, 30)
    print(f"rank {rank} {first:.4f} {last:.4f} scale {scaler.get_scale()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
