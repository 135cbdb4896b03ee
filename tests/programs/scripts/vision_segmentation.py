r"""A segmentation network with an auxiliary head, SyncBatchNorm left out, a polynomial schedule per iteration.

manner = "pytorch/vision, references/segmentation/train.py"
ranks = 2

[[fault]]
name = "the border class 255 is not ignored by the loss"
old = "F.cross_entropy(x, target, ignore_index=255)"
new = "F.cross_entropy(x, target)"
codes = ["DATA903", "FAIL1011"]
where = "F.cross_entropy("

[[fault]]
name = "the auxiliary loss is dropped, its head stays in the model"
old = "return losses[\"out\"] + 0.5 * losses[\"aux\"]"
new = "return losses[\"out\"]"
codes = ["SYNC207", "FAIL1001"]
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _report import finish, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 4


def conv(inputs, outputs, stride=1, dilation=1):
    layer = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class FCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.Sequential(conv(3, 16), conv(16, 16, 2)), conv(16, 32, 1, 2)
        self.classifier = nn.Sequential(conv(32, 16), nn.Dropout(0.1), nn.Conv2d(16, CLASSES, 1))
        self.aux_classifier = nn.Sequential(conv(16, 8), nn.Dropout(0.1), nn.Conv2d(8, CLASSES, 1))

    def forward(self, x):
        size = x.shape[-2:]
        middle = self.layer1(x)
        out = F.interpolate(self.classifier(self.layer2(middle)), size=size, mode="bilinear", align_corners=False)
        aux = F.interpolate(self.aux_classifier(middle), size=size, mode="bilinear", align_corners=False)
        return {"out": out, "aux": aux}


def criterion(inputs, target):
    losses = {}
    for name, x in inputs.items():
        losses[name] = F.cross_entropy(x, target, ignore_index=255)
    return losses["out"] + 0.5 * losses["aux"]


class ConfusionMatrix:
    def __init__(self):
        self.mat = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)

    def update(self, a, b):
        k = (a >= 0) & (a < CLASSES)
        self.mat += torch.bincount(CLASSES * a[k] + b[k], minlength=CLASSES**2).reshape(CLASSES, CLASSES)

    def reduce_from_all_processes(self):
        dist.barrier()
        dist.all_reduce(self.mat)

    def iou(self):
        h = self.mat.float()
        return (h.diag() / (h.sum(1) + h.sum(0) - h.diag())).mean().item()


def scenes(count, seed):
    """Rectangles of the classes before a background; a border of one pixel has the label 255."""
    colours = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(51))
    g = torch.Generator().manual_seed(seed)
    masks = torch.zeros(count, 20, 20, dtype=torch.int64)
    for i in range(count):
        top, left = torch.randint(0, 10, (2,), generator=g).tolist()
        height, width = torch.randint(6, 10, (2,), generator=g).tolist()
        masks[i, top : top + height, left : left + width] = 255
        label = int(torch.randint(1, CLASSES, (1,), generator=g))
        masks[i, top + 1 : top + height - 1, left + 1 : left + width - 1] = label
    images = colours[masks.clamp(max=CLASSES - 1)].permute(0, 3, 1, 2) + 0.4 * torch.randn(count, 3, 20, 20, generator=g)
    return TensorDataset(images, masks)


def main():
    dist.init_process_group("gloo")
    dataset, dataset_test = scenes(192, 1), scenes(32, 2)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 8, sampler=sampler, drop_last=True)
    loader_test = DataLoader(dataset_test, 1, sampler=DistributedSampler(dataset_test, shuffle=False))
    model = nn.parallel.DistributedDataParallel(FCN())
    m = model.module
    groups = [{"params": [*m.layer1.parameters(), *m.layer2.parameters()]}, {"params": m.classifier.parameters()},
              {"params": m.aux_classifier.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=1e-4)
    iters, epochs, losses = len(loader), 3, []
    lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=iters * epochs, power=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for image, target in loader:
            output = model(image)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            losses.append(loss.detach())
        model.eval()
        confmat = ConfusionMatrix()
        with torch.inference_mode():
            for image, target in loader_test:
                confmat.update(target.flatten(), model(image)["out"].argmax(1).flatten())
        confmat.reduce_from_all_processes()
        print(f"epoch {epoch} loss {loss.item():.4f} mean IoU {confmat.iou():.4f}")
    report([m], [optimizer], losses)


if __name__ == "__main__":
    main()
    finish()
