"""A script of one process that starts its own ranks, twice."""

import os
import socket

import torch.distributed as dist
import torch.multiprocessing as mp
from common import batches, digest, finish
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


def work(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    model = nn.Linear(4, 4)
    ddp = DDP(model)
    optimizer = optim.SGD(ddp.parameters(), lr=0.1)
    for x in batches(rank, 4, 8, 4):
        ddp(x).square().mean().backward()
        optimizer.step()
    queue.put((rank, digest(dict(model.state_dict())) is not None))
    del ddp
    finish()


if __name__ == "__main__":
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    for method in ("spawn", "fork"):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        queue = mp.get_context(method).SimpleQueue()
        context = mp.start_processes(work, (port, queue), nprocs=2, start_method=method)
        print(method, sorted(queue.get() for _ in range(2)))
