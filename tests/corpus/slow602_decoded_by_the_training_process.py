# title: Clips are decoded by the process that trains, which takes longer than the step
# source: constructed
# nproc: 2
# expect.codes: SLOW602
# expect.ranks: all
# expect.subject: any
# expect.step: 8
# expect.step_slack: 80
# plain_pytorch: silent
"""Classification of short clips."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULT = os.environ.get("FAULT", "0") == "1"

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(66)
class Clips(Dataset):
    """Clips that are decoded one batch at a time."""

    def __init__(self):
        self.truth = torch.randn(200, 6, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return 220

    def __getitem__(self, index):
        if FAULT:
            time.sleep(0.05)  # stands for the decoder
        generator = torch.Generator().manual_seed(5000 * rank + index)
        x = torch.randn(64, 200, generator=generator)
        return x, (x @ self.truth).argmax(1)


ddp = DistributedDataParallel(nn.Sequential(nn.Linear(200, 256), nn.ReLU(), nn.Linear(256, 6)))
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
track = []
for x, y in DataLoader(Clips(), batch_size=None, num_workers=0):
    loss = nn.functional.cross_entropy(ddp(x), y)
    opt.zero_grad()
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
