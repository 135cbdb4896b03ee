# title: The losses of the training and the validation split are estimated every few steps, and both fall
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A small language model that returns its loss; the estimate runs the inner module in eval mode over both splits."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK, VOCABULARY, EVAL_ITERS = 16, 24, 6


class LanguageModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(BLOCK, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids, targets=None):
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits = self.head(self.norm(self.block(h, src_mask=mask, is_causal=True)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
        return logits, loss


def text(seed, n):
    """Runs of neighbouring letters: what comes next is likely the next letter."""
    gen = torch.Generator().manual_seed(seed)
    steps = torch.where(torch.rand(n, generator=gen) < 0.8, 1, torch.randint(0, VOCABULARY, (n,), generator=gen))
    return steps.cumsum(0) % VOCABULARY


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
splits = {"train": text(1, 20000), "val": text(2, 4000)}
gen = torch.Generator().manual_seed(10 + rank)


def get_batch(split, n=16):
    data = splits[split]
    at = torch.randint(0, len(data) - BLOCK - 1, (n,), generator=gen)
    return torch.stack([data[i : i + BLOCK] for i in at]), torch.stack([data[i + 1 : i + 1 + BLOCK] for i in at])


torch.manual_seed(5)
model = DDP(LanguageModel())
raw_model = model.module
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(500 + rank)


@torch.no_grad()
def estimate_loss():
    out = {}
    raw_model.eval()
    for split in ("train", "val"):
        found = torch.zeros(EVAL_ITERS)
        for k in range(EVAL_ITERS):
            _, loss = raw_model(*get_batch(split))
            found[k] = loss.item()
        out[split] = found.mean()
    raw_model.train()
    return out


losses = []
for step in range(80):
    if step % 5 == 0:
        found = estimate_loss()
        if rank == 0:
            print(f"step {step}: train {found['train']:.4f}, val {found['val']:.4f}", flush=True)
    _, loss = model(*get_batch("train"))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
