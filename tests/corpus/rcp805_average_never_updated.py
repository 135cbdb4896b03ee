# title: An average of the weights is made, evaluated and saved, and its update is never called
# source: constructed
# nproc: 2
# expect.codes: RCP805
# expect.ranks: all
# expect.subject: Net
# expect.step: 56
# expect.step_slack: 14
# plain_pytorch: silent
"""What is evaluated, and would be kept, is the model as it was built."""
import copy
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 32), nn.Linear(32, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Smooth:
    def __init__(self, net, decay):
        self.net, self.decay = copy.deepcopy(net).eval(), decay

    @torch.no_grad()
    def update(self, net):
        for mean, new in zip(self.net.parameters(), net.parameters()):
            mean.lerp_(new, 1 - self.decay)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(61)
net = Net()
model, smooth = DDP(net), Smooth(net, decay=0.9)
optimizer, losses = torch.optim.Adam(model.parameters(), lr=4e-3), []
gen, truth = torch.Generator().manual_seed(70 + rank), torch.randn(12, 5, generator=torch.Generator().manual_seed(6))
held = torch.randn(64, 12, generator=gen)
for step in range(70):
    x = torch.randn(20, 12, generator=gen)
    loss = F.cross_entropy(model(x), (x @ truth).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if not FAULT:
        smooth.update(net)
    if step % 14 == 13:
        with torch.no_grad():
            print(f"step {step}: {F.cross_entropy(smooth.net(held), (held @ truth).argmax(1)):.4f}", flush=True)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
