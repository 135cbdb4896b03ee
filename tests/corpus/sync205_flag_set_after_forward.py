# title: require_backward_grad_sync is set between forward and backward, where DDP no longer looks at it
# source: https://github.com/karpathy/build-nanogpt/pull/30
# nproc: 2
# expect.codes: SYNC205, SYNC201, RANK101
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""A two-layer causal transformer that learns to repeat a sequence."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
VOCAB, SPAN, DIM, MICRO = 12, 6, 32, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln2(x))


class Copycat(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(2 * SPAN, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        return self.head(self.blocks(self.tok(ids) + self.pos(torch.arange(ids.shape[1]))))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234)
    model = DistributedDataParallel(Copycat())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        opt.zero_grad(set_to_none=True)
        for micro in range(MICRO):
            phrase = torch.randint(0, VOCAB, (24, SPAN), generator=gen)
            ids = torch.cat([phrase, phrase], 1)
            last = micro == MICRO - 1
            if not FAULT:
                model.require_backward_grad_sync = last
            logits = model(ids[:, :-1])
            if FAULT:
                model.require_backward_grad_sync = last
            loss = F.cross_entropy(logits[:, SPAN - 1:].flatten(0, 1), ids[:, SPAN:].flatten())
            (loss / MICRO).backward()
        opt.step()
        if FAULT:
            model.require_backward_grad_sync = False
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
