# title: A causal language model in bfloat16 with warm-up, cosine, accumulation and an estimate of both losses
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The usual script: micro-batches under require_backward_grad_sync, tied weights, clipping, evaluation on all ranks."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY, CONTEXT, STEPS, ACCUMULATE = 32, 24, 40, 2


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, d), nn.Embedding(CONTEXT, d)
        self.h = nn.ModuleList(Block(d, 4) for _ in range(2))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, VOCABULARY, bias=False)
        self.apply(self._init)
        self.lm_head.weight = self.wte.weight

    @staticmethod
    def _init(m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
        if isinstance(m, nn.Linear) and m.bias is not None:
            nn.init.zeros_(m.bias)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def get_lr(it):
    if it < 10:
        return 5e-3 * (it + 1) / 10
    return 5e-4 + 0.5 * (1 + math.cos(math.pi * (it - 10) / (STEPS - 10))) * 4.5e-3


def get_batch(split):
    data = text[split]
    at = torch.randint(len(data) - CONTEXT - 1, (12,)).tolist()
    return torch.stack([data[i : i + CONTEXT] for i in at]), torch.stack([data[i + 1 : i + 1 + CONTEXT] for i in at])


@torch.no_grad()
def estimate():
    model.eval()
    out = {s: sum(model.module(*get_batch(s))[1].item() for _ in range(4)) / 4 for s in ("train", "val")}
    model.train()
    return out


def write(n, gen):
    letters = [3]
    for step in torch.randint(0, 3, (n,), generator=gen).tolist():
        letters.append((letters[-1] * 3 + step) % VOCABULARY)
    return torch.tensor(letters)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1337)
gen = torch.Generator().manual_seed(0)
text = {"train": write(9000, gen), "val": write(2000, gen)}
model = DDP(Gpt())
torch.manual_seed(1337 + rank)
decayed = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95))
for it in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    for micro in range(ACCUMULATE):
        model.require_backward_grad_sync = micro == ACCUMULATE - 1
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(*get_batch("train"))
        (loss / ACCUMULATE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if it % 20 == 19:
        losses = estimate()
print(rank, losses, flush=True)
dist.barrier()
dist.destroy_process_group()
