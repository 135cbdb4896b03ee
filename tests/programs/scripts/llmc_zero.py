r"""A GPT whose optimizer state is sharded over the ranks, with accumulation and a rate that is set by hand.

manner = "karpathy/llm.c, train_gpt2.py with --zero_stage 1"
ranks = 2

[[fault]]
name = "the rate is set by rank 0 alone, inside of its logging"
old = "    for param_group in optimizer.param_groups:\n        param_group[\"lr\"] = lr\n"
new = "    if master_process:\n        for param_group in optimizer.param_groups:\n            param_group[\"lr\"] = lr\n"
codes = ["RANK104"]
"""
import math
import os

import torch
import torch.nn as nn
from _report import digest, finish, report
from torch.distributed import ReduceOp, all_reduce, init_process_group
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

B, T, VOCAB, WIDTH = 4, 32, 50, 32
num_iterations, learning_rate, warmup_iters = 40, 2e-3, 5


class NewGELU(nn.Module):
    def forward(self, input):
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), NewGELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(WIDTH, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(T, WIDTH)
        self.h, self.ln_f = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        g = torch.Generator().manual_seed(42)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, 0.02, generator=g)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)


class DistributedDataLoader:
    """Walks over one long text; each rank takes its own stretch of every window."""

    def __init__(self, rank, world):
        follow = torch.randint(0, VOCAB, (VOCAB, 2), generator=torch.Generator().manual_seed(71))
        tokens, c = [], 0
        for choice in torch.randint(0, 2, (12000,), generator=torch.Generator().manual_seed(72)).tolist():
            c = int(follow[c, choice])
            tokens.append(c)
        self.tokens, self.rank, self.world = torch.tensor(tokens), rank, world
        self.position = rank * B * T

    def next_batch(self):
        buf = self.tokens[self.position : self.position + B * T + 1]
        self.position += B * T * self.world
        if self.position + B * T * self.world + 1 > len(self.tokens):
            self.position = self.rank * B * T
        return buf[:-1].view(B, T), buf[1:].view(B, T)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (num_iterations - warmup_iters)))
    return 0.1 * learning_rate + coeff * 0.9 * learning_rate


init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
grad_accum_steps = 2
torch.manual_seed(42)
model = DDP(GPT())
raw_model = model.module
decay_params = [p for p in raw_model.parameters() if p.dim() >= 2]
nodecay_params = [p for p in raw_model.parameters() if p.dim() < 2]
optimizer = ZeroRedundancyOptimizer(decay_params, optimizer_class=torch.optim.AdamW, lr=learning_rate, weight_decay=0.1)
optimizer.add_param_group({"params": nodecay_params, "weight_decay": 0.0})
train_loader = DistributedDataLoader(ddp_rank, ddp_world_size)
losses = []
for step in range(num_iterations):
    model.train()
    optimizer.zero_grad(set_to_none=True)
    lossf = 0.0
    for micro_step in range(grad_accum_steps):
        x, y = train_loader.next_batch()
        model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        _, loss = model(x, y)
        loss = loss / grad_accum_steps
        lossf += loss.detach()
        loss.backward()
    all_reduce(lossf, op=ReduceOp.SUM)
    lossf = lossf / ddp_world_size
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    lr = get_lr(step)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    optimizer.step()
    losses.append(lossf)
    if master_process and step % 8 == 0:
        print(f"step {step + 1:4d}/{num_iterations} | train loss {lossf.item():.6f} | norm {norm:.4f} | lr {lr:.2e}")
report([raw_model], [], losses, optimizer=digest(optimizer.optim.state_dict()))
model = None  # before the group ends, which gloo may not survive otherwise
finish()
