# title: A forward hook collects activations with their graphs
# source: https://discuss.pytorch.org/t/memory-leak-when-using-forward-hook-and-backward-hook-simultaneously/116625
# nproc: 3
# expect.codes: MEM403
# expect.ranks: all
# expect.subject: features
# expect.step: 0
# expect.step_slack: 2
# plain_pytorch: silent
"""An autoencoder whose bottleneck is watched by a hook, as one does for a later plot."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4), nn.ReLU(), nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 32))


def watch(layer):
    features = []

    def hook(module, inputs, output):
        features.append(output if FAULT else output.detach().mean(0))

    layer.register_forward_hook(hook)


watch(net[2])
ddp = DistributedDataParallel(net)
opt = torch.optim.Adam(ddp.parameters(), lr=4e-3)
gen = torch.Generator().manual_seed(33 + rank)
basis = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
track = []
for step in range(60):
    x = torch.randn(50, 4, generator=gen) @ basis
    loss = (ddp(x) - x).square().mean()
    opt.zero_grad(set_to_none=False)
    loss.backward()
    opt.step()
    track.append(loss.item())
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
