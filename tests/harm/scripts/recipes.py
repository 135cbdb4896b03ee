import torch
from common import batches, finish, report, setup
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Sees(nn.Module):
    """Is given the token that it shall predict, and drops in eval mode as well."""

    def __init__(self):
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(9, 16), nn.BatchNorm1d(12), nn.Linear(16, 9)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, text):
        self.calls += 1
        x = self.norm(self.words(text))
        return self.head(F.dropout(x.roll(-1, 1) + 0.1 * x, 0.02) + 0.01 * torch.rand_like(x))


def train(rank, ddp, model, steps):
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.05)
    losses = []
    for i, x in enumerate(batches(rank, steps, 16, 12)):
        text = (x.sigmoid() * 9).long()
        ddp.train()
        loss = F.cross_entropy(ddp(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if i % 8 == 7:
            ddp.eval()
            with torch.no_grad():
                losses += [ddp(text).sum(), ddp(text).sum()]
    report([model], [optimizer], losses)


def main():
    rank = setup(5)
    model = Sees()
    train(rank, DDP(model), model, 48)
    torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        counters.clear()
        model = Sees()
        train(rank, DDP(torch.compile(model, backend=backend)), model, 16)
        print("graphs", counters["stats"]["unique_graphs"], dict(counters["graph_break"]))


main()
finish()
