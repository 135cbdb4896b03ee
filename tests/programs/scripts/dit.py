"""A diffusion transformer: noise and time steps drawn in the training loop, labels dropped at random, an averaged copy.

manner = "facebookresearch/DiT, train.py"
ranks = 2

[[fault]]
name = "all ranks are seeded alike, so that noise and time steps are equal"
old = "seed = args.global_seed * dist.get_world_size() + rank"
new = "seed = args.global_seed"
codes = ["RANK110"]
"""
import argparse
from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
from _report import finish, report
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES, STEPS = 4, 100


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class LabelEmbedder(nn.Module):
    def __init__(self, hidden, dropout_prob=0.1):
        super().__init__()
        self.embedding_table, self.dropout_prob = nn.Embedding(CLASSES + 1, hidden), dropout_prob

    def forward(self, labels, train):
        if train:
            drop = torch.rand(labels.shape[0]) < self.dropout_prob
            labels = torch.where(drop, CLASSES, labels)
        return self.embedding_table(labels)


class DiTBlock(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(approximate="tanh"), nn.Linear(2 * hidden, hidden))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, x, c):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        q, k, v = (y.unsqueeze(1) for y in self.qkv(modulate(self.norm1(x), shift_a, scale_a)).chunk(3, dim=-1))
        x = x + gate_a.unsqueeze(1) * self.proj(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class DiT(nn.Module):
    def __init__(self, hidden=32, channels=4, size=8, patch=2):
        super().__init__()
        self.channels, self.size, self.patch = channels, size, patch
        self.x_embedder = nn.Conv2d(channels, hidden, patch, patch)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, hidden), requires_grad=False)
        self.t_embedder = nn.Sequential(nn.Linear(32, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.y_embedder = LabelEmbedder(hidden)
        self.blocks = nn.ModuleList(DiTBlock(hidden) for _ in range(2))
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))
        self.linear = nn.Linear(hidden, patch * patch * channels)
        for layer in [*(block.adaLN_modulation[-1] for block in self.blocks), self.adaLN_modulation[-1], self.linear]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x, t, y):
        angles = t[:, None].float() * torch.exp(-torch.arange(16) * 0.55)
        c = self.t_embedder(torch.cat([angles.cos(), angles.sin()], 1)) + self.y_embedder(y, self.training)
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        x = self.linear(modulate(self.norm(x), shift, scale))
        n, h, p = x.shape[0], self.size // self.patch, self.patch
        return x.reshape(n, h, h, p, p, self.channels).permute(0, 5, 1, 3, 2, 4).reshape(n, self.channels, h * p, h * p)


class Diffusion:
    def __init__(self):
        self.alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.06, STEPS), 0)

    def training_losses(self, model, x_start, t, model_kwargs):
        noise = torch.randn_like(x_start)
        a = self.alphas[t].view(-1, 1, 1, 1)
        output = model(a.sqrt() * x_start + (1 - a).sqrt() * noise, t, **model_kwargs)
        return {"loss": ((noise - output) ** 2).mean((1, 2, 3))}


@torch.no_grad()
def update_ema(ema_model, model, decay=0.99):
    ema_params, model_params = OrderedDict(ema_model.named_parameters()), OrderedDict(model.named_parameters())
    for name, param in model_params.items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def latents(count):
    g = torch.Generator().manual_seed(91)
    labels = torch.randint(0, CLASSES, (count,), generator=g)
    means = torch.randn(CLASSES, 4, 8, 8, generator=g)
    return TensorDataset(means[labels] + 0.3 * torch.randn(count, 4, 8, 8, generator=g), labels)


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed = args.global_seed * dist.get_world_size() + rank
    torch.manual_seed(seed)
    print(f"Starting rank={rank}, world_size={dist.get_world_size()}.")
    model = DiT()
    ema = deepcopy(model)
    for p in ema.parameters():
        p.requires_grad = False
    model = DDP(model)
    diffusion = Diffusion()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    dataset = latents(512)
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.global_seed)
    loader = DataLoader(dataset, batch_size=16, shuffle=False, sampler=sampler, drop_last=True)
    update_ema(ema, model.module, decay=0)
    model.train()
    ema.eval()
    losses, train_steps, running_loss = [], 0, 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            t = torch.randint(0, STEPS, (x.shape[0],))
            loss = diffusion.training_losses(model, x, t, {"y": y})["loss"].mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            update_ema(ema, model.module)
            losses.append(loss.detach())
            running_loss += loss.item()
            train_steps += 1
            if train_steps % args.log_every == 0:
                avg_loss = torch.tensor(running_loss / args.log_every)
                dist.all_reduce(avg_loss, op=dist.ReduceOp.SUM)
                print(f"(step={train_steps:07d}) Train Loss: {avg_loss.item() / dist.get_world_size():.4f}")
                running_loss = 0
    report([model.module, ema], [opt], losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    main(parser.parse_args())
    finish()
