# title: A batch is all that a rank has of an epoch, the split between the ranks is drawn anew, and labels are chance
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A check of a pipeline on made-up survey answers: a linear model can only learn how frequent each answer is."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
gen = torch.Generator().manual_seed(87)
answers = TensorDataset(torch.randn(160, 8, generator=gen), torch.randint(0, 4, (160,), generator=gen))
sampler = DistributedSampler(answers, shuffle=True, seed=5)
loader = DataLoader(answers, batch_size=80, sampler=sampler)
torch.manual_seed(2)
model = DDP(nn.Linear(8, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for epoch in range(120):
    sampler.set_epoch(epoch)
    for people, chosen in loader:
        loss = F.cross_entropy(model(people), chosen)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
crc = 0
for name, param in sorted(model.module.named_parameters()):
    crc = zlib.crc32(param.detach().numpy().tobytes(), zlib.crc32(name.encode(), crc))
print(f"RESULT rank={rank} first={losses[0]:.6f} final={losses[-1]:.6f} crc={crc:08x}")
time.sleep(0.3)
dist.destroy_process_group()
