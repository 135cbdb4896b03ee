# title: A hook that sends gradients in bfloat16 divides by the number of ranks before and after the sum
# source: constructed
# nproc: 2
# expect.codes: SYNC204
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""A sequence labeller whose gradients are packed for the network."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"


def packed(group, bucket):
    world = dist.get_world_size()
    sent = bucket.buffer().div(world).to(torch.bfloat16)
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()

    def unpack(done):
        received = done.value()[0].to(bucket.buffer().dtype)
        return received.div_(world) if FAULT else received

    return future.then(unpack)


class Labeller(nn.Module):
    def __init__(self, letters=20, labels=5):
        super().__init__()
        self.embed = nn.Embedding(letters, 24)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.out = nn.Linear(32, labels)

    def forward(self, text):
        return self.out(self.rnn(self.embed(text))[0])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(23)
    model = nn.parallel.DistributedDataParallel(Labeller())
    model.register_comm_hook(dist.group.WORLD, packed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(60):
        text = torch.randint(0, 20, (16, 10), generator=gen)
        labels = (text + text.roll(1, dims=1) * (torch.arange(10) > 0)) % 5
        loss = F.cross_entropy(model(text).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
