# title: The reduced gradient is clipped with the same threshold on every rank
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Gradients change between reduction and step, alike on all ranks."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(68)


class Counter(nn.Module):
    """Counts the ones in a bit string, one bit at a time."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 24, batch_first=True)
        self.read = nn.Linear(24, 1)

    def forward(self, bits):
        return self.read(self.rnn(bits)[1][0])


model = DDP(Counter(), gradient_as_bucket_view=True)
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(70):
    bits = (torch.rand(48, 9, 1, generator=gen) > 0.5).float()
    loss = nn.functional.smooth_l1_loss(model(bits), bits.sum(1) / 3)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
