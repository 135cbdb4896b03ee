import torch
from common import finish, report, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self):
        self.base = torch.arange(64.0)[:, None].expand(64, 8).clone()

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"x": self.base[i] / 64 + torch.rand(8), "y": i % 5}


def main():
    rank = setup(12)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data, losses = Noisy(), []
    for kwargs in (
        {"num_workers": 0, "shuffle": True},
        {"num_workers": 2, "sampler": DistributedSampler(data), "persistent_workers": True},
        {"num_workers": 1, "sampler": DistributedSampler(data), "multiprocessing_context": "spawn"},
    ):
        loader = DataLoader(data, batch_size=8, **kwargs)
        for epoch in range(1 if "multiprocessing_context" in kwargs else 2):
            if "sampler" in kwargs:
                kwargs["sampler"].set_epoch(epoch)
            for batch in loader:
                loss = F.cross_entropy(ddp(batch["x"]), batch["y"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        del loader
    report([model], [optimizer], losses)


if __name__ == "__main__":
    main()
    finish()
