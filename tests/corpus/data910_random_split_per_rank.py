# title: random_split uses the rank's own seed, so validation samples of one rank are training samples of another
# source: https://github.com/TensorAuto/OpenTau/pull/498
# nproc: 3
# expect.codes: DATA910
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 80
# plain_pytorch: silent
"""Seeds differ on purpose for augmentation; the split should not have used them."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

FAULT = os.environ.get("FAULT", "0") == "1"


def robot_log():
    gen = torch.Generator().manual_seed(6)
    joints = torch.randn(1000, 12, generator=gen)
    gripper = (joints[:, 0] + joints[:, 1] * joints[:, 2] > 0).long()
    return TensorDataset(joints, gripper)


def split(data):
    sizes = [840, 160]
    if FAULT:
        return random_split(data, sizes)
    return random_split(data, sizes, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = sum(nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in loader)
    model.train()
    dist.all_reduce(total)
    return total.item() / 160


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(24)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 2)))
    torch.manual_seed(1234 + 111 * rank)
    train, held_out = split(robot_log())
    train_sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=14, sampler=train_sampler)
    val_loader = DataLoader(held_out, batch_size=27, sampler=DistributedSampler(held_out, shuffle=False))
    opt = torch.optim.AdamW(model.parameters(), lr=8e-3)
    losses = []
    for epoch in range(4):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x + 0.02 * torch.randn_like(x)), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        value = validate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: validation {value:.4f}", flush=True)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
