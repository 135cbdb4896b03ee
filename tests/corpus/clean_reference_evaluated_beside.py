# title: A reference model is part of each loss, and is evaluated beside the model that is trained
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The copy stays as it is on purpose: it holds the model near to where it began."""
import copy
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(64)
net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
reference, model = copy.deepcopy(net).eval().requires_grad_(False), DDP(net)
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=4e-3), []
gen, truth = torch.Generator().manual_seed(90 + rank), torch.randn(12, 4, generator=torch.Generator().manual_seed(7))
held = torch.randn(64, 12, generator=gen)
for step in range(66):
    x = torch.randn(20, 12, generator=gen)
    out = model(x)
    loss = F.cross_entropy(out, (x @ truth).argmax(1)) + 0.05 * F.mse_loss(out, reference(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 11 == 10:
        model.eval()
        with torch.no_grad():
            scores = [F.cross_entropy(part(held), (held @ truth).argmax(1)).item() for part in (net, reference)]
        model.train()
        print(f"step {step}: {scores[0]:.4f}, reference {scores[1]:.4f}", flush=True)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
