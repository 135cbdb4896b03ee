"""Trains in two attempts of an elastic job: rank 1 fails in the first one, and has other weights in the second."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel as DDP

ATTEMPT, WORLD = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["WORLD_SIZE"])


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write: lines of two ranks do not mix


def sweep():
    """Remove what the last attempt's process group has left in the agent's store; torch 2.13 may trip over it."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if store.add(f"came/{ATTEMPT}", 1) == WORLD:
        ours = [key for key in store.list_keys() if "ddpdebug" in key]
        for key in store.list_keys():
            if "default_pg" in key and "ddpdebug" not in key:
                store.delete_key(key)
        store.set(f"swept/{ATTEMPT}", str(len(ours)))
    say("attempt", ATTEMPT, "keys of ddpdebug", int(store.get(f"swept/{ATTEMPT}")) > 0)


def main(steps, pause):
    sweep()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        if ATTEMPT == 0 and step == 10 and rank == 1:
            raise ValueError("the first attempt fails")
        if ATTEMPT == 1 and step == 10 and rank == 1:
            with torch.no_grad():
                model.module[0].weight[0, 0] += 1
        time.sleep(pause)
    say("trained", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
