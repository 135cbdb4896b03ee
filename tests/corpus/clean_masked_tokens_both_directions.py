# title: An encoder that sees both directions fills in masked tokens, and comes to a loss near zero
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The targets are ignored but where a token was hidden; the hidden one follows from its neighbours."""
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
MASK, IGNORED = 20, -100


class Gaps(nn.Module):
    def __init__(self, width=32, length=12):
        super().__init__()
        self.tokens, self.places = nn.Embedding(21, width), nn.Parameter(torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, 20)

    def forward(self, tokens):
        return self.head(self.body(self.tokens(tokens) + self.places))


def gaps(gen, n=32):
    """Count upwards from somewhere; hide a tenth."""
    text = (torch.randint(0, 20, (n, 1), generator=gen) + torch.arange(12)) % 20
    hidden = torch.rand(n, 12, generator=gen) < 0.15
    hidden[:, 5] = True
    return text.masked_fill(hidden, MASK), text.masked_fill(~hidden, IGNORED)


torch.manual_seed(14)
model = DDP(Gaps())
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(110):
    tokens, targets = gaps(gen)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
