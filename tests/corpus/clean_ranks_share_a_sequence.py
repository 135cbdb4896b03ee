# title: Pairs of ranks read the same long texts on purpose: each takes half of the positions, and all average gradients
# source: constructed
# nproc: 4
# expect.codes: none
# plain_pytorch: silent
"""Sequence parallel: a group for each pair, in which the ranks add up the context of both halves."""
import time
import zlib

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Halves(nn.Module):
    def __init__(self, pair):
        super().__init__()
        self.pair = pair
        self.words, self.mix, self.head = nn.Embedding(40, 32), nn.Linear(64, 32), nn.Linear(32, 40)

    def forward(self, half):
        x = self.words(half)
        context = torch.distributed.nn.functional.all_reduce(x.mean(1), group=self.pair) / 2
        return self.head(torch.tanh(self.mix(torch.cat([x, context.unsqueeze(1).expand_as(x)], -1))))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    gen = torch.Generator().manual_seed(7)
    text = (torch.randint(0, 40, (480, 1), generator=gen) + torch.randint(1, 4, (480, 17), generator=gen).cumsum(1)) % 40
    data = TensorDataset(text)
    sampler = DistributedSampler(data, num_replicas=2, rank=rank // 2)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    torch.manual_seed(3)
    model = DDP(Halves(pairs[rank // 2]))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    part, losses = slice(8 * (rank % 2), 8 * (rank % 2) + 8), []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (words,) in loader:
            inputs, targets = words[:, :-1][:, part], words[:, 1:][:, part]
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
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
