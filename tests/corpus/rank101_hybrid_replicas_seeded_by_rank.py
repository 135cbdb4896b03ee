# title: Under HSDP each rank draws its own initial weights, and nothing makes the replicas equal
# source: https://github.com/allenai/OLMo-core/issues/319
# nproc: 4
# expect.codes: RANK101
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.phase: init
# plain_pytorch: silent
"""A tagger of short sequences. `fully_shard` takes each rank's part of its own weights and broadcasts nothing."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.encoder = nn.GRU(16, 24, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.output = nn.Linear(24, 6)

    def forward(self, tokens):
        return self.output(self.norm(self.encoder(self.embedding(tokens))[0]))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(3 + (rank if FAULT else 0))
    model = Tagger()
    fully_shard(model.output, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(50 + rank)
    losses = []
    for _ in range(40):
        tokens = torch.randint(0, 40, (8, 12), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens % 6).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
