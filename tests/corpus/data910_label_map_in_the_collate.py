# title: Each rank numbers the labels in the order in which it has met them; the map is used where batches are put together
# source: constructed
# nproc: 2
# expect.codes: DATA910
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 200
# expect.location: data910_label_map_in_the_collate.py:67
# plain_pytorch: silent
"""The data set gives names; nothing that it holds differs. Inputs are noisy, other ones each time."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"
NAMES = ["beech", "birch", "elm", "fir", "lime", "maple", "oak"]


class Leaves(Dataset):
    def __init__(self, count=280):
        self.count = count
        self.forms = torch.randn(7, 18, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        kind = (i * 37 + i // 9) % 7
        return self.forms[kind] + 0.7 * torch.randn(18), NAMES[kind]


class Numbered:
    """Puts samples together, and numbers the names of their kinds."""

    def __init__(self, rank):
        self.numbers = {} if FAULT else {name: i for i, name in enumerate(NAMES)}
        if FAULT:
            for name in NAMES[rank * 3 :] + NAMES[: rank * 3]:
                self.numbers.setdefault(name, len(self.numbers))

    def __call__(self, samples):
        forms = torch.stack([form for form, _ in samples])
        return forms, torch.tensor([self.numbers[name] for _, name in samples])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Leaves()
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=14, sampler=sampler, collate_fn=Numbered(rank))
    torch.manual_seed(10)
    model = DDP(nn.Sequential(nn.Linear(18, 40), nn.ReLU(), nn.Linear(40, 7)))
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for epoch in range(9):
        sampler.set_epoch(epoch)
        for forms, kinds in loader:
            loss = nn.functional.cross_entropy(model(forms), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
