# title: The training loop never clears the gradients
# source: constructed
# nproc: 2
# expect.codes: RCP808
# expect.ranks: all
# expect.subject: any
# expect.step: 1
# expect.step_slack: 2
# plain_pytorch: silent
"""Character-level GRU on a periodic alphabet; the fault has no zero_grad."""
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


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, 16)
        self.gru = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 12)

    def forward(self, ids):
        return self.head(self.gru(self.emb(ids))[0])


def text(gen):
    start = torch.randint(0, 12, (16, 1), generator=gen)
    stride = torch.randint(1, 4, (16, 1), generator=gen)
    return (start + stride * torch.arange(13)) % 12


def main():
    torch.manual_seed(7)
    model = DDP(CharModel())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(50):
        ids = text(gen)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 12), ids[:, 1:].reshape(-1))
        if not FAULT:
            opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return model, losses


model, losses = main()
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
