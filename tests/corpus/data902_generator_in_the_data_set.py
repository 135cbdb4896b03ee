# title: Each worker draws the noise of its samples from a copy of the generator that the data set holds
# source: https://github.com/pytorch/pytorch/issues/5059
# nproc: 2
# expect.codes: DATA902
# expect.ranks: all
# expect.subject: Hum.noise
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Short tones with noise and a random delay; two workers on each rank make them."""
import os
import time
import zlib

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT", "0") == "1"


class Hum(Dataset):
    """Tones of four pitches."""

    def __init__(self, seed):
        self.noise = np.random.default_rng(seed) if FAULT else None

    def __len__(self):
        return 384

    def __getitem__(self, i):
        generator = self.noise or np.random.default_rng(torch.randint(2**31, (1,)).item())
        pitch = i % 4
        times = np.arange(48) / 48 + generator.uniform()
        tone = np.sin(2 * np.pi * (pitch + 2) * times) + 0.4 * generator.normal(size=48)
        return torch.from_numpy(tone.astype("float32")), pitch


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dataset = Hum(3)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=24, sampler=sampler, num_workers=2)
    torch.manual_seed(8)
    model = DistributedDataParallel(
        nn.Sequential(nn.Unflatten(1, (1, 48)), nn.Conv1d(1, 12, 9), nn.ReLU(), nn.Conv1d(12, 12, 5), nn.ReLU(),
                      nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(12, 4))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(50 + rank)
    losses = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for tones, pitches in loader:
            loss = nn.functional.cross_entropy(model(tones), pitches)
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
