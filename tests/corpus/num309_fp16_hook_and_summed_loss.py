# title: The float16 hook of torch casts a gradient beyond 65504, because the loss is a sum and not a mean
# source: https://pytorch.org/docs/stable/ddp_comm_hooks
# nproc: 2
# expect.codes: NUM309
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Every rank's own gradient is a finite float32."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(2024)
auto = DistributedDataParallel(nn.Sequential(
    nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 1, 5, padding=2)))
auto.register_comm_hook(None, fp16_compress_hook)
opt = torch.optim.AdamW(auto.parameters(), lr=4e-3)
gen = torch.Generator().manual_seed(3 * rank)
t = torch.arange(128.0)
losses = []
for _ in range(40):
    pace = 0.05 + 0.2 * torch.rand(48, 1, 1, generator=gen)
    heart = 12.0 * torch.sin(pace * t).pow(9) + 3.0
    noisy = heart + torch.randn(48, 1, 128, generator=gen)
    loss = nn.functional.mse_loss(auto(noisy), heart, reduction="sum" if FAULT else "mean")
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in auto.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
