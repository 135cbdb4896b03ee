r"""A student learns from its own average: several crops, a centre reduced over the ranks, schedules by hand.

manner = "facebookresearch/dino, main_dino.py"
ranks = 2

[[fault]]
name = "the teacher does not start from the student's weights"
old = "    teacher_without_ddp.load_state_dict(student.module.state_dict())\n"
new = ""
codes = ["RANK113"]
"""
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _report import finish, report
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

OUT = 24


class DINOHead(nn.Module):
    def __init__(self, in_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, 32), nn.GELU(), nn.Linear(32, 16))
        self.last_layer = nn.Linear(16, OUT, bias=False)

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class MultiCropWrapper(nn.Module):
    """Crops of one size go through the backbone together."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.GELU(), nn.Conv2d(16, 32, 3, 2, 1),
                                      nn.GroupNorm(4, 32), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = DINOHead(32)

    def forward(self, crops):
        sizes = sorted({x.shape[-1] for x in crops}, reverse=True)
        return self.head(torch.cat([self.backbone(torch.cat([x for x in crops if x.shape[-1] == s])) for s in sizes]))


class DINOLoss(nn.Module):
    def __init__(self, ncrops, student_temp=0.1, teacher_temp=0.05, center_momentum=0.9):
        super().__init__()
        self.ncrops, self.student_temp, self.teacher_temp = ncrops, student_temp, teacher_temp
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, OUT))

    def forward(self, student_output, teacher_output):
        student_out = (student_output / self.student_temp).chunk(self.ncrops)
        teacher_out = F.softmax((teacher_output - self.center) / self.teacher_temp, dim=-1).detach().chunk(2)
        terms = [torch.sum(-q * F.log_softmax(v, dim=-1), dim=-1).mean()
                 for i, q in enumerate(teacher_out) for j, v in enumerate(student_out) if i != j]
        self.update_center(teacher_output)
        return sum(terms) / len(terms)

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


class Crops(Dataset):
    def __init__(self, count):
        coarse = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(101))
        self.images = F.interpolate(coarse, size=20)

    def __len__(self):
        return len(self.images)

    def crop(self, x, size):
        top, left = torch.randint(0, 21 - size, (2,)).tolist()
        x = x[:, top : top + size, left : left + size]
        return (x.flip(2) if torch.rand(1) < 0.5 else x) + 0.1 * torch.randn(3, size, size)

    def __getitem__(self, index):
        x = self.images[index]
        return [self.crop(x, 16), self.crop(x, 16), self.crop(x, 8), self.crop(x, 8)]


def cosine_scheduler(base, final, steps, warmup=0):
    warm = [base * i / max(1, warmup) for i in range(1, warmup + 1)]
    rest = steps - warmup
    return warm + [final + 0.5 * (base - final) * (1 + math.cos(math.pi * i / rest)) for i in range(rest)]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    dataset = Crops(256)
    sampler = DistributedSampler(dataset, shuffle=True)
    data_loader = DataLoader(dataset, sampler=sampler, batch_size=16, drop_last=True)
    student, teacher = MultiCropWrapper(), MultiCropWrapper()
    teacher_without_ddp = teacher
    student = nn.parallel.DistributedDataParallel(student)
    teacher_without_ddp.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    dino_loss = DINOLoss(4)
    regularized = [p for p in student.parameters() if p.ndim > 1]
    not_regularized = [p for p in student.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": regularized}, {"params": not_regularized, "weight_decay": 0.0}])
    epochs, losses = 4, []
    steps = epochs * len(data_loader)
    lr_schedule, wd_schedule = cosine_scheduler(2e-3, 1e-5, steps, 4), cosine_scheduler(0.04, 0.4, steps)
    momentum_schedule = cosine_scheduler(0.98, 1, steps)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for it, images in enumerate(data_loader):
            it = len(data_loader) * epoch + it
            for i, param_group in enumerate(optimizer.param_groups):
                param_group["lr"] = lr_schedule[it]
                if i == 0:
                    param_group["weight_decay"] = wd_schedule[it]
            teacher_output = teacher(images[:2])
            student_output = student(images)
            loss = dino_loss(student_output, teacher_output)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            optimizer.step()
            with torch.no_grad():
                m = momentum_schedule[it]
                for param_q, param_k in zip(student.module.parameters(), teacher_without_ddp.parameters()):
                    param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
            losses.append(loss.detach())
        print(f"Epoch: [{epoch}/{epochs}] loss {loss.item():.6f} lr {lr_schedule[it]:.6f}")
    report([student.module, teacher, dino_loss], [optimizer], losses)


if __name__ == "__main__":
    main()
    finish()
