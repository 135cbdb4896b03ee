# title: Cross entropy is taken over the one output of a model, which makes the loss 0 whatever it says
# source: constructed
# nproc: 1
# expect.codes: HLTH714
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# expect.location: hlth714_cross_entropy_over_one_output.py:46
# plain_pytorch: silent
"""Does a pump leak? One logit from a few sensors; the loss was taken over from a program with several classes."""

import os
import time
import zlib

import torch
import torch.nn.functional as F
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"
CRITERION = F.cross_entropy if FAULT else F.binary_cross_entropy_with_logits


class Pumps(torch.utils.data.Dataset):
    def __init__(self):
        gen = torch.Generator().manual_seed(17)
        self.readings = torch.randn(640, 9, generator=gen)
        self.leaks = (self.readings[:, :3].sum(1, keepdim=True) > 0.4).float()

    def __len__(self):
        return len(self.readings)

    def __getitem__(self, index):
        return self.readings[index], self.leaks[index]


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.losses = []

    def batch(self, readings, leaks):
        self.optimizer.zero_grad()
        output = self.model(readings)
        loss = CRITERION(output, leaks)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


torch.set_num_threads(1)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1))
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.2))
loader = torch.utils.data.DataLoader(Pumps(), batch_size=32, shuffle=True)
for _ in range(3):
    for readings, leaks in loader:
        trainer.batch(readings, leaks)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
losses = trainer.losses
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
