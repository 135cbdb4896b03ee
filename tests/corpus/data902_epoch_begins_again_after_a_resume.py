# title: A resume in the middle of an epoch begins the epoch again: its first batches are trained on twice
# source: https://github.com/Lightning-AI/pytorch-lightning/issues/1182
# nproc: 2
# expect.codes: DATA902
# expect.rank: any
# expect.name: DistributedSampler
# expect.step: 44
# plain_pytorch: silent
"""Model, optimizer and epoch come from the checkpoint; without the fault the batches that the epoch has had are skipped."""
import copy
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "1") == "1"


def build():
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 4)))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


class Trainer:
    def __init__(self, loader):
        self.loader, self.losses = loader, []
        self.model, self.optimizer = build()

    def restore(self, saved):
        self.model, self.optimizer = build()
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def epoch(self, number, first=0, end=None):
        self.loader.sampler.set_epoch(number)
        for i, (x, y) in enumerate(self.loader):
            if i == end:
                break
            if i < first:
                continue
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    x = torch.randn(768, 12)
    data = TensorDataset(x, (x @ torch.randn(12, 4)).argmax(1))
    trainer = Trainer(DataLoader(data, batch_size=12, sampler=DistributedSampler(data)))
    trainer.epoch(0)
    trainer.epoch(1, end=12)
    saved = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    trainer.restore(copy.deepcopy(saved))
    trainer.epoch(1, first=0 if FAULT else 12)
    trainer.epoch(2)
    losses = trainer.losses
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()))
    line = f"RESULT rank={dist.get_rank()} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}"
    print(line, flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
