# title: zero_grad is called on the optimizer of the other network: the gradients of this one pile up
# source: constructed
# nproc: 2
# expect.codes: RCP808
# expect.ranks: all
# expect.subject: any
# expect.step: 1
# expect.step_slack: 2
# plain_pytorch: silent
"""A policy and a value network with an optimizer each; the fault clears the value network's gradients twice."""
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
torch.manual_seed(1)
policy = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)))
value = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
opt_policy = torch.optim.SGD(policy.parameters(), lr=0.02)
opt_value = torch.optim.SGD(value.parameters(), lr=0.02)
gen = torch.Generator().manual_seed(30 + rank)
target = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
losses = []
for _ in range(50):
    state = torch.randn(32, 8, generator=gen)
    best = (state @ target).argmax(1)
    reward = (state**2).mean(1, keepdim=True)

    value_loss = F.smooth_l1_loss(value(state), reward)
    opt_value.zero_grad()
    value_loss.backward()
    opt_value.step()

    log_probability = F.log_softmax(policy(state), dim=1)
    policy_loss = -log_probability.gather(1, best[:, None]).mean()
    (opt_value if FAULT else opt_policy).zero_grad()
    policy_loss.backward()
    opt_policy.step()
    losses.append(policy_loss.item())
model = policy
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
