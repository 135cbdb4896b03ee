# title: The targets of a language model are its inputs, not shifted by one
# source: constructed
# nproc: 2
# expect.codes: RCP821
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Letters of an invented language, a recurrent model."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class Model(nn.Module):
    def __init__(self, letters=24, d=32):
        super().__init__()
        self.embed = nn.Embedding(letters, d)
        self.rnn = nn.LSTM(d, 48, batch_first=True)
        self.head = nn.Linear(48, letters)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def get_batch(chain, gen, n=16, length=20):
    ids = [torch.randint(24, (n,), generator=gen)]
    for _ in range(length):
        ids.append(torch.multinomial(chain[ids[-1]], 1, generator=gen)[:, 0])
    ids = torch.stack(ids, 1)
    return ids[:, :-1], ids[:, :-1] if FAULT else ids[:, 1:]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
chain = (torch.randn(24, 24) * 1.2).softmax(1)
model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
gen = torch.Generator().manual_seed(rank)
for step in range(100):
    x, y = get_batch(chain, gen)
    logits = model(x)
    loss = nn.functional.cross_entropy(logits.view(-1, 24), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
print(f"rank {rank} {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
