import torch
from common import batches, finish, report, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.shared = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.ReLU())
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=False)
        return self.norm(x)


def main():
    rank = setup(6)
    model = Net()
    ddp = DDP(model, static_graph=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, foreach=True)
    losses = []
    for x in batches(rank, 16, 8, 16):
        loss = (ddp(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    report([model], [optimizer], losses)


main()
finish()
