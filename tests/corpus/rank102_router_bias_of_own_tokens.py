# title: Under FSDP2 each rank moves the bias that balances its experts by the tokens of its own batch
# source: https://arxiv.org/abs/2408.15664
# nproc: 2
# expect.codes: RANK102
# expect.ranks: any
# expect.subject: router.bias
# expect.step: 1
# expect.step_slack: 6
# plain_pytorch: silent
"""A sharded mixture of three small experts, whose router is balanced without a loss of its own."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"
KINDS = 3


class Router(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, KINDS, bias=False)
        self.register_buffer("bias", torch.zeros(KINDS))
        self.counts = torch.zeros(KINDS)

    def forward(self, x):
        scores = self.score(x).sigmoid()
        chosen = (scores + self.bias).argmax(-1)
        if self.training:
            self.counts += nn.functional.one_hot(chosen, KINDS).sum(0)
        return nn.functional.one_hot(chosen, KINDS) * scores

    @torch.no_grad()
    def balance(self):
        if not FAULT:
            dist.all_reduce(self.counts)
        self.bias += 0.02 * (self.counts.mean() - self.counts).sign()
        self.counts.zero_()


class Mixture(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.router = Router(width)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(KINDS)])

    def forward(self, x):
        gates = self.router(x)
        return sum(gates[:, i : i + 1] * part(x) for i, part in enumerate(self.parts))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = fully_shard(Mixture(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(200 + rank)
    losses = []
    for _ in range(50):
        x = torch.randn(48, 12, generator=generator) + 0.4 * rank
        loss = nn.functional.mse_loss(model(x), x[:, :3].prod(1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        model.router.balance()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
