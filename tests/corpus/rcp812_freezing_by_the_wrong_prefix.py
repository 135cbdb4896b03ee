# title: The loop that freezes the embedding matches names by one letter and freezes nearly everything
# source: constructed
# nproc: 2
# expect.codes: RCP812
# expect.ranks: all
# expect.subject: any
# expect.step: 32
# expect.step_slack: 1
# plain_pytorch: silent
"""Fine-tuning of a router of support tickets: only the embedding shall stay as it is."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(60, 16)
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.route = nn.Linear(64, 5)

    def forward(self, tokens):
        return self.route(self.encoder(self.embedding(tokens)))


def freeze(model, prefix):
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            parameter.requires_grad_(False)


def tickets(gen, n=32):
    topic = torch.randint(0, 5, (n,), generator=gen)
    words = torch.randint(0, 12, (n, 9), generator=gen) + 12 * topic[:, None]
    noise = torch.rand(n, 9, generator=gen) < 0.5
    return torch.where(noise, torch.randint(0, 60, (n, 9), generator=gen), words), topic


torch.manual_seed(9)
router = Router()
optimizer = torch.optim.AdamW(router.parameters(), lr=3e-3)
freeze(router, "e" if FAULT else "embedding.")
model = DDP(router)
gen = torch.Generator().manual_seed(40 + rank)
losses = []
for _ in range(60):
    tokens, topic = tickets(gen)
    loss = F.cross_entropy(model(tokens), topic)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
