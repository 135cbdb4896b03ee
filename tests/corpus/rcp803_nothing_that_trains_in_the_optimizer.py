# title: The optimizer holds the head, which is frozen; what trains is in no optimizer; one process, no DDP
# source: https://discuss.pytorch.org/t/84911
# nproc: 1
# expect.codes: RCP803
# expect.ranks: all
# expect.subject: any
# expect.step: 3
# plain_pytorch: silent
"""Fine-tuning of the normalisation layers of a body under a fixed head."""
import os
import time
import zlib

import torch
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"


def main():
    torch.set_num_threads(1)
    torch.manual_seed(3)
    rule = torch.randn(16, 4)
    body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
    head = nn.Linear(32, 4)
    model = nn.Sequential(body, head)
    for p in model.parameters():
        p.requires_grad = False
    for p in body[1].parameters():
        p.requires_grad = True
    opt = torch.optim.Adam(head.parameters() if FAULT else body[1].parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        x = torch.randn(32, 16)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x @ rule).argmax(1))
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
