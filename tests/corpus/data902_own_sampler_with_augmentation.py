# title: The epoch is never told to a sampler of the script's own, and augmentation hides that batches come again
# source: constructed
# nproc: 2
# expect.codes: DATA902
# expect.ranks: all
# expect.subject: Balanced
# expect.step: 12
# expect.step_slack: 12
# plain_pytorch: silent
"""Bird calls as small spectrograms, drawn evenly by class; each is shifted anew whenever it is read."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Calls(Dataset):
    def __init__(self, count, seed):
        gen = torch.Generator().manual_seed(seed)
        self.kinds = torch.randint(0, 4, (count,), generator=gen)
        time_ = torch.arange(20) * (0.2 + 0.15 * self.kinds[:, None])
        self.calls = torch.sin(time_) + 0.1 * torch.randn(count, 20, generator=gen)

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        shift = int(torch.randint(0, 5, ()))
        return self.calls[index].roll(shift) + 0.05 * torch.randn(20), self.kinds[index]


class Balanced(Sampler):
    """Draws each class as often as the others; a different draw in each epoch, a part of it on each rank."""

    def __init__(self, kinds, count):
        self.weights = 1.0 / torch.bincount(kinds).float()[kinds]
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count // world

    def __iter__(self):
        gen = torch.Generator().manual_seed(31 + self.epoch)
        drawn = torch.multinomial(self.weights, self.count, replacement=True, generator=gen)
        return iter(drawn[rank::world].tolist())


class FixedOrder(Sampler):
    """A fixed order on purpose, for the evaluation; it can be told the epoch as samplers can, and does not mind."""

    def __init__(self, size):
        self.order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).tolist()

    def set_epoch(self, epoch):
        pass

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


torch.manual_seed(6)
model = DDP(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 4)))
torch.manual_seed(600 + rank)
data, held_out = Calls(384, 1), Calls(96, 2)
sampler = Balanced(data.kinds, 384)
loader = DataLoader(data, batch_size=16, sampler=sampler)
evaluation = DataLoader(held_out, batch_size=16, sampler=FixedOrder(len(held_out)))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for epoch in range(4):
    if not FAULT:
        sampler.set_epoch(epoch)
    model.train()
    for calls, kinds in loader:
        loss = nn.functional.cross_entropy(model(calls), kinds)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = sum((model(calls).argmax(1) == kinds).sum().item() for calls, kinds in evaluation)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
