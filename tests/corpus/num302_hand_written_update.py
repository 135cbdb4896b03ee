# title: A loop that updates its parameters by hand takes the logarithm of a probability that has become zero
# source: constructed
# nproc: 1
# expect.codes: NUM302, NUM303
# expect.ranks: 0
# expect.subject: any
# expect.step: 12
# expect.op: log
# expect.location: num302_hand_written_update.py:49
# plain_pytorch: silent
"""A click model without any optimizer: the gradients are applied in the loop."""
import os
import zlib

import torch
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(12, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, features):
        return torch.sigmoid(self.out(torch.tanh(self.hidden(features)))).squeeze(1)


def sessions(g, step):
    features = torch.randn(64, 12, generator=g)
    if step == 12:
        features[0] = 0.0
    return features, (features[:, 0] + 0.3 * features[:, 1] > 0).float()


torch.set_num_threads(1)
torch.manual_seed(5)
model = Clicks()
g = torch.Generator().manual_seed(21)
rate, curve = 0.5, []
for step in range(50):
    features, clicked = sessions(g, step)
    p = model(features)
    if FAULT:
        p = p * (features.abs().sum(1) > 0)  # sessions without features count as no click
    q = p.clamp(max=0.999)
    loss = -(clicked * torch.log(q) + (1 - clicked) * torch.log(1 - q)).mean()
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-rate)
    curve.append(loss.item())

digest = 0
for parameter in model.parameters():
    digest = zlib.crc32(parameter.detach().numpy().tobytes(), digest)
print(f"RESULT rank=0 first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={digest:08x}", flush=True)
