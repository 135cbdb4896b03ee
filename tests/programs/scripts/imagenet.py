r"""A residual network with command-line switches, meters, a best checkpoint, and a validation reduced over ranks.

manner = "pytorch/examples, imagenet/main.py under torchrun"
ranks = 2

[[fault]]
name = "the branch for machines without GPUs stands first, as published: a job on CPUs gets no DDP"
old = "    if args.distributed:\n        model ="
new = "    if not torch.cuda.is_available():\n        print(\"using CPU, this will be slow\")\n    elif args.distributed:\n        model ="
codes = ["SYNC208"]
"""
import argparse
import os

import torch
import torch.distributed as dist
from _report import finish, report
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        self.layer1, self.layer2 = BasicBlock(16, 16), BasicBlock(16, 32, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def photographs(count, seed, classes=10):
    coarse = torch.randn(classes, 3, 4, 4, generator=torch.Generator().manual_seed(31))
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, (count,), generator=generator)
    images = nn.functional.interpolate(coarse[target], size=16)
    return TensorDataset(images + 0.5 * torch.randn(count, 3, 16, 16, generator=generator), target)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()


def accuracy(output, target, topk=(1, 5)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1))
        return [100.0 * correct[:k].reshape(-1).float().sum().item() / target.size(0) for k in topk]


def train(loader, model, criterion, optimizer, epoch, losses):
    model.train()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if i % 8 == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] Loss {loss.item():.4e} Acc@1 {accuracy(output, target)[0]:.2f}")


def validate(loader, model, criterion, args):
    top1 = AverageMeter()

    def run_validate(loader):
        with torch.no_grad():
            for images, target in loader:
                top1.update(accuracy(model(images), target)[0], images.size(0))

    model.eval()
    run_validate(loader)
    if args.distributed:
        top1.all_reduce()
        seen = len(loader.sampler) * args.world_size
        if seen < len(loader.dataset):
            run_validate(DataLoader(Subset(loader.dataset, range(seen, len(loader.dataset))), batch_size=args.batch_size))
    print(f" * Acc@1 {top1.sum / top1.count:.3f}")
    return top1.sum / top1.count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    args.world_size, args.rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    args.distributed = args.world_size > 1
    dist.init_process_group(backend="gloo")
    model = ResNet(10)
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    train_dataset, val_dataset = photographs(1000, 1), photographs(205, 2)
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, args.batch_size, shuffle=False, sampler=train_sampler)
    val_loader = DataLoader(val_dataset, args.batch_size, sampler=DistributedSampler(val_dataset, shuffle=False, drop_last=True))
    best_acc1, losses = 0, []
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, losses)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()
        if acc1 > best_acc1 and args.rank == 0:
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "best.pth.tar")
        best_acc1 = max(acc1, best_acc1)
    report([model], [optimizer], losses)


if __name__ == "__main__":
    main()
    finish()
