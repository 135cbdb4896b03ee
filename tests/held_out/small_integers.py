# title: A hook that sends gradients as small integers divides by their largest, which is zero in one step
# source: constructed
# nproc: 2
# expect.codes: NUM309
# expect.ranks: any
# expect.subject: any
# expect.step: 20
# plain_pytorch: silent
"""Missing words of sentences; in one step no word of a batch is missing, and the loss is zero."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"


def quantised(_, bucket):
    buffer, world = bucket.buffer(), dist.get_world_size()
    largest = buffer.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if not FAULT:
        largest.clamp_(min=1e-12)
    whole = (buffer / largest * 2000).round()
    future = dist.all_reduce(whole, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * (largest / (2000 * world)))


class Words(nn.Module):
    def __init__(self, vocabulary=30):
        super().__init__()
        self.embed = nn.Embedding(vocabulary + 1, 20)
        self.conv = nn.Conv1d(20, 40, 3, padding=1)
        self.out = nn.Linear(40, vocabulary)

    def forward(self, tokens):
        return self.out(torch.relu(self.conv(self.embed(tokens).mT)).mT)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(2)
model = nn.parallel.DistributedDataParallel(Words())
model.register_comm_hook(None, quantised)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
gen = torch.Generator().manual_seed(rank)
for step in range(50):
    start = torch.randint(30, (16, 1), generator=gen)
    tokens = (start + torch.arange(12)) % 30
    missing = torch.rand(16, 12, generator=gen) < (0.0 if step == 20 else 0.2)
    logits = model(tokens.masked_fill(missing, 30))
    each = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    loss = (each * missing.flatten()).sum() / missing.sum().clamp(min=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
