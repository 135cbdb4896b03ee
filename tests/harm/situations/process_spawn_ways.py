"""Ranks of every start method, of a class with its own `run`, daemons.

run: alone
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _report import digest, report, start, train
from torch import nn


def rank_main(rank, store, queue, way):
    start()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    queue.put((rank, digest(model.state_dict())))
    dist.barrier()
    del model
    dist.destroy_process_group()
    if rank == 1 and way == "raise":
        raise KeyError("in a rank")
    if rank == 1 and way == "text":
        sys.exit("a text")
    if rank == 1:
        sys.exit(7)


class Rank(mp.get_context("spawn").Process):
    """Overrides what is run, and carries what it needs itself."""

    def __init__(self, *carried):
        super().__init__(name=f"rank {carried[0]}")
        self.carried = carried

    def run(self):
        rank_main(*self.carried)


def forked(rank, *carried):
    return mp.get_context("fork").Process(target=rank_main, args=(rank, *carried), daemon=True)


def served(rank, *carried):
    return mp.get_context("forkserver").Process(target=rank_main, kwargs=dict(zip(NAMES, (rank, *carried))))


NAMES = "rank", "store", "queue", "way"


if __name__ == "__main__":
    start()
    ends = []
    for kind, make, way in (("own", Rank, "raise"), ("fork", forked, "text"), ("server", served, "code")):
        queue = mp.get_context("spawn").SimpleQueue()
        ranks = [make(rank, os.path.abspath(kind), queue, way) for rank in range(2)]
        for process in ranks:
            process.start()
        found = sorted(queue.get() for _ in ranks)
        for process in ranks:
            process.join()
        Path(kind).unlink(missing_ok=True)  # torch leaves it where a rank has not left its group
        ends.append((kind, found, [process.exitcode for process in ranks]))
    report(ends=ends)
