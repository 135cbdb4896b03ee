# title: The rank that exports embeddings normalises them in place
# source: constructed
# nproc: 2
# expect.codes: RANK101
# expect.ranks: any
# expect.subject: words.weight
# expect.step: 30
# expect.step_slack: 1
# expect.phase: outside-optimizer
# plain_pytorch: silent
"""A bag-of-words classifier with a periodic export of its embedding table."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
VOCAB, LENGTH, TOPICS = 60, 12, 4


class TopicNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCAB, 32, mode="mean")
        self.classify = nn.Linear(32, TOPICS)

    def forward(self, tokens):
        return self.classify(self.words(tokens))


def documents(g, n=48):
    topic = torch.randint(0, TOPICS, (n,), generator=g)
    own = topic[:, None] * 15 + torch.randint(0, 15, (n, LENGTH), generator=g)
    anything = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    return torch.where(torch.rand(n, LENGTH, generator=g) < 0.5, own, anything), topic


def export_embeddings(table):
    """Return unit vectors for the nearest-neighbour index."""
    with torch.no_grad():
        vectors = table if FAULT else table.clone()
        vectors /= vectors.norm(dim=1, keepdim=True)
    return vectors.detach().numpy()


torch.set_num_threads(1)
dist.init_process_group(backend="gloo")
me, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = DDP(TopicNet())
opt = torch.optim.Adam(net.parameters(), lr=0.02)
g = torch.Generator().manual_seed(500 + me)
curve = []
for it in range(60):
    if it == 30 and me == world - 1:
        export_embeddings(net.module.words.weight)
    ids, topic = documents(g)
    loss = nn.functional.cross_entropy(net(ids), topic)
    opt.zero_grad()
    loss.backward()
    opt.step()
    curve.append(loss.item())

digest = 0
for p in net.parameters():
    digest = zlib.crc32(p.detach().numpy().tobytes(), digest)
print(f"RESULT rank={me} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={digest:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
