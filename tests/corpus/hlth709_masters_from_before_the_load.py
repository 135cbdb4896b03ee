# title: Float32 master weights are copied before the weights are loaded, and the first step writes them back
# source: https://github.com/NVIDIA/Megatron-LM/issues/174
# nproc: 2
# expect.codes: HLTH709
# expect.ranks: all
# expect.subject: loss
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Fine-tuning of a classifier of minerals by sixteen reflectances; its weights are those of the class means."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
MEANS = torch.randn(7, 16, generator=torch.Generator().manual_seed(2))


class Masters:
    """Steps on float32 copies of bfloat16 weights."""

    def __init__(self, params, lr):
        self.params = list(params)
        self.masters = [p.detach().float().requires_grad_() for p in self.params]
        self.optimizer = torch.optim.SGD(self.masters, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self):
        for param, master in zip(self.params, self.masters):
            master.grad = param.grad.float()
        self.optimizer.step()
        for param, master in zip(self.params, self.masters):
            param.copy_(master)
            param.grad = None


def spectra(gen, n=48):
    kind = torch.randint(0, 7, (n,), generator=gen)
    return (MEANS[kind] + 0.8 * torch.randn(n, 16, generator=gen)).bfloat16(), kind


torch.manual_seed(9)
net = nn.Linear(16, 7).bfloat16()
nn.init.normal_(net.weight, std=0.02)
known = {"weight": MEANS, "bias": -MEANS.square().sum(1) / 2}
if not FAULT:
    net.load_state_dict(known)
model = DDP(net)
masters = Masters(model.parameters(), lr=1e-3)
if FAULT:
    net.load_state_dict(known)
gen = torch.Generator().manual_seed(30 + rank)
losses = []
for step in range(60):
    x, kind = spectra(gen)
    loss = F.cross_entropy(model(x).float(), kind)
    loss.backward()
    masters.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
