# title: Objects are looked for in pictures that hold any number of them, some none, so losses differ in what they have
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Batches are lists of dicts; the loss is divided by the number of objects on all ranks, as detectors do."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Scenes(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(i)
        count = int(torch.randint(0, 4, (1,), generator=gen))
        cells = torch.randperm(16, generator=gen)[:count]
        size = 0.5 + torch.rand(count, 2, generator=gen)
        image = 0.2 * torch.randn(3, 16, 16, generator=gen)
        for cell, (h, w) in zip(cells.tolist(), size.tolist()):
            y, x = 4 * (cell // 4), 4 * (cell % 4)
            image[:, y : y + 4, x : x + 4] += torch.tensor([1.0, h - 1, w - 1])[:, None, None]
        return {"image": image, "cells": cells, "size": size}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.ReLU())
        self.there, self.size = nn.Conv2d(32, 1, 1), nn.Conv2d(32, 2, 1)
        nn.init.constant_(self.there.bias, -2.0)

    def forward(self, images, targets):
        h = self.backbone(torch.stack(images))
        there, size = self.there(h).flatten(1), self.size(h).flatten(2).transpose(1, 2)
        label = torch.zeros_like(there)
        for row, target in zip(label, targets):
            row[target["cells"]] = 1
        found = torch.cat([size[i, t["cells"]] for i, t in enumerate(targets)])
        wanted = torch.cat([t["size"] for t in targets])
        return {
            "there": F.binary_cross_entropy_with_logits(there, label, reduction="sum"),
            "size": F.l1_loss(found, wanted, reduction="sum"),
        }


def objects(targets, world):
    n = torch.tensor(float(sum(len(t["cells"]) for t in targets)))
    dist.all_reduce(n)
    return max(n.item() / world, 1.0)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scenes = Scenes()
    sampler = DistributedSampler(scenes, world, rank)
    loader = DataLoader(scenes, batch_size=10, sampler=sampler, collate_fn=list)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            losses = model([b["image"] for b in batch], batch)
            loss = sum(losses.values()) / objects(batch, world)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 20.0)
            optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
