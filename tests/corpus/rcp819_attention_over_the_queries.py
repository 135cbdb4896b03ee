# title: Attention written by hand takes the softmax over the queries, so that the weights of a query do not add up to one
# source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
# nproc: 2
# expect.codes: RCP819
# expect.ranks: all
# expect.step: 0
# plain_pytorch: silent
"""A decoder that looks things up in a memory: cross attention with one head."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT") == "1"


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))

    def forward(self, asked, memory):
        scores = torch.bmm(self.query(asked), self.key(memory).transpose(1, 2)) / 4
        weights = torch.softmax(scores, dim=1 if FAULT else 2)
        return self.out(torch.bmm(weights, self.value(memory)))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(41)
    model = DistributedDataParallel(Reader())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(90 + rank)
    losses = []
    for _ in range(50):
        memory = torch.randn(12, 7, 16, generator=generator)
        places = torch.randint(0, 7, (12, 5), generator=generator)
        wanted = torch.gather(memory, 1, places[:, :, None].expand(12, 5, 16))
        asked = wanted + 0.2 * torch.randn(12, 5, 16, generator=generator)
        loss = nn.functional.mse_loss(model(asked, memory), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
