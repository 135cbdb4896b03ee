# title: A resume loads the weights and the epoch, and begins with an optimizer without state
# source: constructed
# nproc: 2
# expect.codes: RCP822
# expect.ranks: all
# expect.subject: AdamW
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""The second half goes on with the epochs of the first, as another process does after a restart."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
gen, losses = torch.Generator().manual_seed(8), []
x = torch.randn(384, 14, generator=gen)
data = TensorDataset(x, (x @ torch.randn(14, 4, generator=gen)).argmax(1))


def build():
    torch.manual_seed(62)
    net = nn.Sequential(nn.Linear(14, 32), nn.GELU(), nn.Linear(32, 4))
    return net, torch.optim.AdamW(net.parameters(), lr=4e-3)


def checkpoint():
    """What the job before has left: its weights after three epochs, and moments."""
    net, optimizer = build()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=gen), alpha=0.02)
    states = [(torch.randn(p.shape, generator=gen), torch.rand(p.shape, generator=gen)) for p in net.parameters()]
    state = {
        i: {"step": torch.tensor(36.0), "exp_avg": m * 1e-3, "exp_avg_sq": (v + 0.5) * 1e-4}
        for i, (m, v) in enumerate(states)
    }
    return {"model": net.state_dict(), "optimizer": {**optimizer.state_dict(), "state": state}, "epoch": 3}


saved = checkpoint()
net, optimizer = build()
net.load_state_dict(saved["model"])
if not FAULT:
    optimizer.load_state_dict(saved["optimizer"])
model = DDP(net)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
for epoch in range(saved["epoch"], 7):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
