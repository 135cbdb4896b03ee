"""torch.multiprocessing.spawn of two children that train, with a main guard.

run: alone
watched: no, the children are started without us
"""

import torch
import torch.multiprocessing as mp
from _report import digest, report, start, train
from torch import nn


class Config:
    """Pickled by its place in __main__."""

    rate = 0.1


def child(rank, config, queue):
    start(rank)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), config.rate)
    train(model, optimizer)
    queue.put((rank, __name__, type(config).__module__, digest(model.state_dict())))


if __name__ == "__main__":
    start()
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(child, (Config(), queue), 2)
    print("children", sorted(queue.get() for _ in range(2)))
    report()
