# title: Every rank that the script starts seeds its shuffling alike and has no sampler, so all read the same batches
# source: constructed
# nproc: 1
# expect.codes: DATA901
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 8
# plain_pytorch: silent
"""A regression on tabular data in processes of `multiprocessing`, each with a data loader of its own."""
import multiprocessing
import os
import tempfile
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
WORLD = 2


def table():
    g = torch.Generator().manual_seed(11)
    x = torch.randn(960, 9, generator=g)
    return TensorDataset(x, (x[:, :3].prod(1, keepdim=True) + x[:, 3:4]).tanh())


class Trainer(multiprocessing.get_context("spawn").Process):
    def __init__(self, rank, place):
        super().__init__(name=f"trainer-{rank}")
        self.rank, self.place = rank, place

    def run(self):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{self.place}", rank=self.rank, world_size=WORLD)
        torch.manual_seed(8)
        net = DDP(nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 1)))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        data = table()
        sampler = None if FAULT else DistributedSampler(data, seed=2)
        loader = DataLoader(data, batch_size=32, sampler=sampler, shuffle=sampler is None)
        curve = []
        for epoch in range(3):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for x, y in loader:
                loss = nn.functional.mse_loss(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                curve.append(loss.item())
        crc = 0
        for p in net.parameters():
            crc = zlib.crc32(p.detach().numpy().tobytes(), crc)
        print(f"RESULT rank={self.rank} first={curve[0]:.4f} final={curve[-1]:.4f} crc={crc:08x}", flush=True)
        time.sleep(0.3)
        dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        trainers = [Trainer(rank, os.path.join(folder, "place")) for rank in range(WORLD)]
        for trainer in trainers:
            trainer.start()
        for trainer in trainers:
            trainer.join()
        raise SystemExit(max(abs(trainer.exitcode) for trainer in trainers))


if __name__ == "__main__":
    main()
