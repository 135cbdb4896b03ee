r"""A vision transformer with stochastic depth, bf16 autocast, accumulation, clipping, mixup and an averaged copy.

manner = "huggingface/pytorch-image-models, train.py"
ranks = 2

[[fault]]
name = "the loss is not divided by the number of accumulated batches"
old = "                if accum_steps > 1:\n                    loss /= accum_steps\n"
new = ""
codes = ["RCP809"]
"""
import contextlib
import copy

import torch
import torch.distributed as dist
from _report import finish, report
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES, SIZE, PATCH = 6, 16, 4


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    def __init__(self, dim, heads, drop_path):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop_path = DropPath(drop_path)

    def attend(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        x = x + self.drop_path(self.attend(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, dim=32, depth=2, drop_path=0.1):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, PATCH, PATCH)
        self.cls_token = nn.Parameter(1e-2 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, 2, drop_path * i / (depth - 1)) for i in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.lerp_(model_v, 1.0 - self.decay)


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


class Mixup:
    def __init__(self, alpha, smoothing):
        self.beta, self.smoothing = torch.distributions.Beta(alpha, alpha), smoothing

    def one_hot(self, target):
        off = self.smoothing / CLASSES
        return torch.full((len(target), CLASSES), off).scatter_(1, target[:, None], 1 - self.smoothing + off)

    def __call__(self, x, target):
        lam = self.beta.sample().item()
        return x * lam + x.flip(0) * (1 - lam), self.one_hot(target) * lam + self.one_hot(target.flip(0)) * (1 - lam)


def photographs(count, seed):
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(61))
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(0, CLASSES, (count,), generator=g)
    return TensorDataset(F.interpolate(coarse[target], size=SIZE) + 0.4 * torch.randn(count, 3, SIZE, SIZE, generator=g), target)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, mixup_fn, model_ema, accum_steps, scheduler, losses):
    model.train()
    last_accum_steps = len(loader) % accum_steps
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % accum_steps == 0
        if batch_idx >= last_batch_idx_to_accum:
            accum_steps = last_accum_steps
        input, target = mixup_fn(input, target)
        with contextlib.nullcontext() if need_update else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_fn(model(input), target)
                if accum_steps > 1:
                    loss /= accum_steps
            loss.backward()
        if not need_update:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model_ema.update(model.module)
        scheduler.step()
        losses.append(loss.detach())
    print(f"Train: {epoch} Loss: {loss.item() * accum_steps:.4f}")


@torch.no_grad()
def validate(model, loader, name):
    model.eval()
    total = torch.zeros(3)
    for input, target in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(input)
        loss = F.cross_entropy(output.float(), target, reduction="sum")
        total += torch.stack([loss, (output.argmax(1) == target).sum().float(), torch.tensor(float(len(target)))])
    dist.all_reduce(total)
    print(f"{name} Loss: {total[0] / total[2]:.4f} Acc@1: {100 * total[1] / total[2]:.2f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42 + dist.get_rank())
    model = VisionTransformer()
    model_ema = ModelEma(model, decay=0.95)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=2e-3)
    model = nn.parallel.DistributedDataParallel(model)
    model_ema.module.load_state_dict(model.module.state_dict())
    dataset, dataset_eval = photographs(600, 1), photographs(128, 2)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 12, sampler=sampler, drop_last=True)
    loader_eval = DataLoader(dataset_eval, 32, sampler=DistributedSampler(dataset_eval, shuffle=False))
    epochs, losses = 3, []
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=13 * epochs)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader, optimizer, SoftTargetCrossEntropy(), Mixup(0.8, 0.1), model_ema, 2, scheduler, losses)
        validate(model, loader_eval, "Test:")
        validate(model_ema.module, loader_eval, "Test (EMA):")
    report([model.module, model_ema], [optimizer], losses)


if __name__ == "__main__":
    main()
    finish()
