# title: The second of two optimizers was given the first one's model: it is stepped twice, the other part never; one process
# source: https://pytorch.org/docs/stable/optim.html
# nproc: 1
# expect.codes: RCP803
# expect.ranks: all
# expect.subject: any
# expect.step: 1
# plain_pytorch: silent
"""A body and a head with an optimizer each, as papers with two rates have it."""
import os
import time
import zlib

import torch
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"


def main():
    torch.set_num_threads(1)
    torch.manual_seed(5)
    rule = torch.randn(16, 4)
    body, head = nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 4)
    optimizers = [
        torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9),
        torch.optim.SGD((body if FAULT else head).parameters(), lr=0.1, momentum=0.9),
    ]
    losses = []
    for _ in range(60):
        x = torch.randn(32, 16)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(body(x)), (x @ rule).argmax(1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for m in (body, head) for p in m.parameters()))
    print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
