"""A character GPT: micro-batches, synchronised in the last by `require_backward_grad_sync`, warm-up and cosine.

manner = "karpathy/nanoGPT, train.py under torchrun"
ranks = 2

[[fault]]
name = "gradients are synchronised in the first micro-batch instead of the last"
old = "micro_step == gradient_accumulation_steps - 1"
new = "micro_step == 0"
codes = ["SYNC205"]
"""
import math
import os

import torch
import torch.nn as nn
from _report import finish, report
from torch.distributed import init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

eval_interval = 20
max_iters = 50
gradient_accumulation_steps = 4
batch_size = 8
block_size = 32
n_layer, n_head, n_embd, dropout = 2, 2, 32, 0.1
learning_rate, min_lr, warmup_iters = 3e-3, 3e-4, 8
grad_clip = 1.0


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (y.view(B, T, n_head, C // n_head).transpose(1, 2) for y in self.c_attn(x).split(n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.apply(self._init_weights)
        self.wte.weight = self.lm_head.weight

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

    def configure_optimizers(self, weight_decay, lr):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def characters(length, seed):
    follow = torch.randint(0, 30, (30, 2), generator=torch.Generator().manual_seed(9))
    text, c = [], 0
    for choice in torch.randint(0, 2, (length,), generator=torch.Generator().manual_seed(seed)).tolist():
        c = int(follow[c, choice])
        text.append(c)
    return torch.tensor(text)


data = {"train": characters(20000, 1), "val": characters(4000, 2)}


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    return x, torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


ddp = int(os.environ.get("RANK", -1)) != -1
init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
seed_offset = ddp_rank
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + seed_offset)

model = GPT(30)
optimizer = model.configure_optimizers(0.1, learning_rate)
model = DDP(model)
raw_model = model.module


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        out[split] = torch.stack([raw_model(*get_batch(split))[1] for _ in range(4)]).mean().item()
    model.train()
    return out


losses = []
X, Y = get_batch("train")
for iter_num in range(max_iters + 1):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: {estimate_loss()}")
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.detach())
    if iter_num % 10 == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
report([raw_model], [optimizer], losses)
model = None  # before the group ends, which gloo may not survive otherwise
finish()
