# title: The head's group has a learning rate a hundred thousand times too low
# source: constructed
# nproc: 1
# expect.codes: HLTH705
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 40
# plain_pytorch: silent
"""A recurrent classifier in one process, with a group for each part."""

import os
import time
import zlib

import torch
from torch import nn
from torch.nn import functional as F

FAULT = os.environ.get("FAULT", "0") == "1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, t):
        return self.head(self.rnn(self.emb(t))[0][:, -1])


def main():
    torch.set_num_threads(1)
    rank = 0
    torch.manual_seed(3)
    model = Net()
    groups = [{"params": model.emb.parameters()}, {"params": model.rnn.parameters()}, {"params": model.head.parameters(), "lr": 0.1 * (1e-5 if FAULT else 1)}]
    opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(10)
    losses = []
    for step in range(80):
        t = torch.randint(0, 50, (32, 6), generator=gen)
        loss = F.cross_entropy(model(t), t[:, -1] % 5)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
