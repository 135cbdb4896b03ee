r"""Label smoothing, mixup in the collate function, an averaged model, warm-up and cosine, repeated augmentation.

manner = "pytorch/vision, references/classification/train.py"
ranks = 2

[[fault]]
name = "train_sampler.set_epoch is missing"
old = "        train_sampler.set_epoch(epoch)\n"
new = ""
codes = ["DATA902"]

[[fault]]
name = "the schedule, meant per epoch, is stepped with every batch"
old = "        optimizer.step()\n"
new = "        optimizer.step()\n        lr_scheduler.step()\n"
codes = ["RCP806", "RCP807"]
"""
import math

import torch
import torch.distributed as dist
from _report import finish, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

EPOCHS, CLASSES = 5, 8


class RASampler(torch.utils.data.Sampler):
    """Each sample comes to three ranks in a row with other augmentations."""

    def __init__(self, dataset, repetitions=3):
        self.size, self.repetitions, self.epoch = len(dataset), repetitions, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.selected = self.size // self.world

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        indices = [i for i in torch.randperm(self.size, generator=g).tolist() for _ in range(self.repetitions)]
        return iter(indices[self.rank :: self.world][: self.selected])

    def __len__(self):
        return self.selected

    def set_epoch(self, epoch):
        self.epoch = epoch


class ShuffleUnit(nn.Module):
    def __init__(self, channels):
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True),
        )

    def forward(self, x):
        x1, x2 = x.chunk(2, dim=1)
        out = torch.cat((x1, self.branch(x2)), dim=1)
        b, c, h, w = out.shape
        return out.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


def shufflenet():
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
    return nn.Sequential(stem, ShuffleUnit(32), ShuffleUnit(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        super().__init__(model, avg_fn=lambda avg, param, num: decay * avg + (1 - decay) * param, use_buffers=True)


def mixup(batch):
    images, target = default_collate(batch)
    target = nn.functional.one_hot(target, CLASSES).float()
    lam = float(torch._sample_dirichlet(torch.tensor([0.2, 0.2]))[0])
    return lam * images + (1 - lam) * images.roll(1, 0), lam * target + (1 - lam) * target.roll(1, 0)


def photographs(count, seed):
    coarse = torch.randn(CLASSES, 3, 3, 3, generator=torch.Generator().manual_seed(41))
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, CLASSES, (count,), generator=generator)
    images = nn.functional.interpolate(coarse[target], size=12)
    return TensorDataset(images + 0.4 * torch.randn(count, 3, 12, 12, generator=generator), target)


def train_one_epoch(model, criterion, optimizer, loader, epoch, model_ema, lr_scheduler, losses):
    model.train()
    for i, (image, target) in enumerate(loader):
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        if i % 4 == 0:
            model_ema.update_parameters(model)
            if epoch < 1:
                model_ema.n_averaged.fill_(0)
        losses.append(loss.detach())
    print(f"Epoch: [{epoch}] loss {loss.item():.4f} lr {optimizer.param_groups[0]['lr']:.5f}")


def evaluate(model, criterion, loader, name):
    model.eval()
    total = torch.zeros(3)
    with torch.inference_mode():
        for image, target in loader:
            output = model(image)
            hits = (output.argmax(1) == target).sum()
            total += torch.stack([criterion(output, target) * len(image), hits, torch.tensor(len(image))])
    dist.barrier()
    dist.all_reduce(total)
    print(f"{name} loss {total[0] / total[2]:.4f} Acc@1 {100 * total[1] / total[2]:.2f}")


def main():
    dist.init_process_group("gloo")
    dist.barrier()
    dataset, dataset_test = photographs(512, 1), photographs(128, 2)
    train_sampler = RASampler(dataset)
    test_sampler = torch.utils.data.distributed.DistributedSampler(dataset_test, shuffle=False)
    data_loader = DataLoader(dataset, batch_size=16, sampler=train_sampler, collate_fn=mixup)
    data_loader_test = DataLoader(dataset_test, batch_size=16, sampler=test_sampler)
    model = shufflenet()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    others = [p for p in model.parameters() if all(p is not n for n in norms)]
    groups = [{"params": others, "weight_decay": 2e-5}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    main_lr = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS - 1, eta_min=0.0)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, main_lr], milestones=[1])
    model = nn.parallel.DistributedDataParallel(model)
    model_ema = ExponentialMovingAverage(model.module, decay=math.exp(-1 / 10))
    losses = []
    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, epoch, model_ema, lr_scheduler, losses)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test, "Test:")
        evaluate(model_ema, criterion, data_loader_test, "Test: EMA")
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "model_ema": model_ema.state_dict()}, "checkpoint.pth")
    report([model.module, model_ema], [optimizer], losses)


if __name__ == "__main__":
    main()
    finish()
