"""Environment variables set by the script before it imports torch.

run: alone
env: OMP_NUM_THREADS=-
"""

import os
import sys

known = {"re", "threading", "json", "random", "click", "numpy", "torch"}
print(sorted(known & sys.modules.keys()), type(sys.meta_path[0]), sys.meta_path[-1])
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["TORCH_LOGS"] = "+onnx"

import logging

import torch
import torch.distributed as dist
from torch import nn

print(torch.get_num_threads(), dist.get_debug_level(), logging.getLogger("torch.onnx").level)
print([type(one) for one in sys.meta_path], torch.__spec__.loader.__dict__.keys(), torch.__loader__ is torch.__spec__.loader)
torch.manual_seed(0)
print(torch.randn(3_000_001).sum().item())  # in parts, one for each thread
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
print(model.weight.sum().item())
