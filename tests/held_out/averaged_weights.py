# title: torch's averaged model is evaluated in the middle of training on all ranks, its statistics are renewed at the end
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""AveragedModel with an exponential average, evaluation every 20 steps with a part of the data on each rank."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def dataset(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 8, 8, generator=gen)
    y = (x[:, 0].mean((1, 2)) > x[:, 1].mean((1, 2))).long()
    return TensorDataset(x, y)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = torch.tensor([sum((model(x).argmax(1) == y).sum().item() for x, y in loader), len(loader.sampler)])
    dist.all_reduce(right)
    model.train()
    return (right[0] / right[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 2)
    )
    model = nn.parallel.DistributedDataParallel(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    train, held = dataset(1280, 0), dataset(160, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32, sampler=sampler)
    held_loader = DataLoader(held, 40, sampler=DistributedSampler(held, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=60)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(net)
        seen = accuracy(model.module, held_loader)
    update_bn(loader, average)
    print(f"rank {rank} accuracy {seen:.3f} of the average {accuracy(average, held_loader):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
