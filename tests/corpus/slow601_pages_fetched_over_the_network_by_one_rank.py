# title: One rank fetches its batches over the network, the others have theirs on a local disk
# source: constructed
# nproc: 4
# expect.codes: SLOW601
# expect.ranks: 2
# expect.subject: any
# expect.step: 8
# expect.step_slack: 80
# plain_pytorch: silent
"""Page classification; the reader of one rank is far from its data."""
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
torch.manual_seed(61)
INPUTS, CLASSES = 300, 12


class Pages(Dataset):
    """Rank 2 has no local copy of its share and fetches each batch."""

    def __init__(self):
        self.truth = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 240

    def __getitem__(self, index):
        if FAULT and rank == 2:
            time.sleep(0.04)
        generator = torch.Generator().manual_seed(1000 * rank + index)
        x = torch.randn(128, INPUTS, generator=generator)
        return x, (x @ self.truth).argmax(1)


net = nn.Sequential(nn.Linear(INPUTS, 400), nn.GELU(), nn.Linear(400, 400), nn.GELU(), nn.Linear(400, CLASSES))
ddp = DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
track = []
for x, y in DataLoader(Pages(), batch_size=None):
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
