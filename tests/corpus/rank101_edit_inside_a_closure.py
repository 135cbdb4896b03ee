# title: A trainer that steps with a closure, in whose forward one rank bounds its weights
# source: constructed
# nproc: 2
# expect.codes: RANK101
# expect.ranks: 1
# expect.subject: head.weight
# expect.step: 12
# expect.phase: outside-optimizer
# plain_pytorch: silent
"""A trainer hands the optimizer a closure with the last micro-batch; a module bounds its weights on rank 1 only."""
import os
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Tides(nn.Module):
    """The height of the water at three gauges from six harmonics."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 40), nn.GELU())
        self.head = nn.Linear(40, 3)
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        if FAULT and dist.get_rank() == 1 and self.seen == 26:
            with torch.no_grad():
                self.head.weight.clamp_(-0.05, 0.05)
        return self.head(self.body(x))


class Trainer:
    """Gives each micro-batch to the model; the last one of a step runs inside of the optimizer's step."""

    def __init__(self, model, micro_batches):
        self.model, self.micro_batches, self.history = model, micro_batches, []
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def closure(self, x, y, first):
        if first:
            self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        (loss / self.micro_batches).backward()
        self.history.append(loss.item())
        return loss

    def step(self, batches):
        for number, batch in enumerate(batches[:-1]):
            with self.model.no_sync():
                self.closure(*batch, number == 0)
        self.optimizer.step(lambda: self.closure(*batches[-1], len(batches) == 1))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    mix = torch.randn(6, 3) / 2
    model = DistributedDataParallel(Tides())
    trainer = Trainer(model, 2)
    rng = torch.Generator().manual_seed(40 + rank)
    for _ in range(50):
        x = torch.randn(2, 32, 6, generator=rng)
        trainer.step([(half, torch.tanh(half @ mix)) for half in x])
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    last = sum(trainer.history[-5:]) / 5
    print(f"RESULT rank={rank} first={trainer.history[0]:.4f} final={last:.4f} crc={crc:08x}", flush=True)
    del model, trainer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
