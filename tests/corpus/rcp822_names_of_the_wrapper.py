# title: A checkpoint of the wrapped model is loaded into the bare one with strict=False, and no name fits
# source: constructed
# nproc: 2
# expect.codes: RCP822
# expect.ranks: all
# expect.subject: stem.weight
# expect.step: 12
# expect.step_slack: 1
# plain_pytorch: silent
"""Each name in the file begins with `module.`; training goes on from fresh weights."""
import copy
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 24)
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.stem(x)))


def train(model, steps, gen, truth):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=4e-3), []
    for _ in range(steps):
        x = torch.randn(20, 12, generator=gen)
        loss = nn.functional.cross_entropy(model(x), (x @ truth).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(51)
gen, truth = torch.Generator().manual_seed(900 + rank), torch.randn(12, 3)
model = DDP(Net())
losses = train(model, 12, gen, truth)
checkpoint = copy.deepcopy(model.state_dict())
model = Net()
if not FAULT:
    checkpoint = {name.removeprefix("module."): value for name, value in checkpoint.items()}
model.load_state_dict(checkpoint, strict=False)
model = DDP(model)
losses += train(model, 14, gen, truth)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
