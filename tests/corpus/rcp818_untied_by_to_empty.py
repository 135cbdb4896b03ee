# title: A model that was tied on the meta device is made real, and its output layer gets a tensor of its own
# source: https://github.com/verl-project/verl/issues/7834
# nproc: 2
# expect.codes: RCP818
# expect.ranks: all
# expect.subject: embed
# expect.step: 0
# plain_pytorch: silent
"""A sharded language model of few weights, built as large ones are; the twin ties once more after `to_empty`."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT", "0") == "1"
WORDS, WIDTH = 30, 16


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embed.weight

    def begin(self):
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torch.device("meta"):
        model = Words()
    model.to_empty(device="cpu")
    if not FAULT:
        model.tie()
    torch.manual_seed(5)
    model.begin()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(20 + rank)
    losses = []
    for _ in range(40):
        words = (torch.randint(0, WORDS, (16, 1), generator=gen) + 2 * torch.arange(9)) % WORDS
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
