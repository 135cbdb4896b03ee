"""A character-level transformer on the text of the licence, trained with DDP. Plain torch, nothing of ddpdebug in it.

    torchrun --standalone --nproc-per-node 4 demo/train.py

`--break-weight STEP` corrupts one weight on rank 2 after that step, as a bit flip in memory would;
`--break-lr STEP` changes the learning rate on rank 1.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that everyone uses
from torch.nn.parallel import DistributedDataParallel

CONTEXT, WIDTH, HEADS, DEPTH = 64, 96, 4, 3


class Block(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        b, t, c = x.shape
        q, k, v = (h.view(b, t, HEADS, c // HEADS).transpose(1, 2) for h in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharacterModel(nn.Module):
    """Predicts the next character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, time) token ids to (batch, time, vocabulary) logits."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--break-weight", type=int, default=-1)
    parser.add_argument("--break-lr", type=int, default=-1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_text()
    characters = sorted(set(text))
    data = torch.tensor([characters.index(c) for c in text])
    torch.manual_seed(0)
    model = DistributedDataParallel(CharacterModel(len(characters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(1000 + rank)

    started = time.monotonic()
    for step in range(args.steps):
        starts = torch.randint(0, len(data) - CONTEXT - 1, (8,), generator=generator)
        batch = torch.stack([data[s : s + CONTEXT + 1] for s in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 2 and step == args.break_weight:
            with torch.no_grad():
                model.module.layers[1].mlp[0].weight.view(-1)[1234] *= 1e7
        if rank == 1 and step == args.break_lr:
            optimizer.param_groups[0]["lr"] *= 3
        if rank == 0 and step % 30 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.monotonic() - started:5.1f} s", flush=True)
    if rank == 0:
        print(f"step {args.steps:4d}  loss {loss.item():.3f}  done", flush=True)
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
