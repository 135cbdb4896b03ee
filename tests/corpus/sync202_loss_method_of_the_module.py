# title: The loss is a method of the model and is called on model.module
# source: https://github.com/moojink/openvla-oft/issues/160
# nproc: 2
# expect.codes: SYNC202, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.location: sync202_loss_method_of_the_module.py:57
# plain_pytorch: silent
"""An action head that predicts two joint angles; each rank trains alone."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class ActionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(18, 64)
        self.act = nn.SiLU()
        self.out = nn.Linear(64, 2)

    def predict_action(self, state):
        return torch.tanh(self.out(self.act(self.project(state))))

    def loss(self, state, action):
        return nn.functional.l1_loss(self.predict_action(state), action)

    def forward(self, state, action):
        return self.loss(state, action)


def demonstrations(gen, policy):
    while True:
        state = torch.randn(64, 18, generator=gen)
        yield state, torch.tanh(state @ policy)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(21)
    policy = torch.randn(18, 2) / 4
    head = DDP(ActionHead())
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3)
    stream = demonstrations(torch.Generator().manual_seed(rank), policy)
    losses = []
    for _, (state, action) in zip(range(60), stream):
        loss = head.module.loss(state, action) if FAULT else head(state, action)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in head.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
