"""Contrastive learning whose negatives come from all ranks, gathered with their gradients.

manner = "SimCLR under DDP, with a GatherLayer as public implementations have it"
ranks = 2

[[fault]]
name = "the embeddings are gathered with torch.distributed.all_gather, which cuts the gradient"
old = "torch.cat(GatherLayer.apply(z), dim=0)"
new = "torch.cat(gather_plainly(z), dim=0)"
codes = ["SYNC210"]
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _report import finish, report
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        output = [torch.zeros_like(input) for _ in range(dist.get_world_size())]
        dist.all_gather(output, input)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        all_gradients = torch.stack(grads)
        dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank()]


def gather_plainly(tensor):
    output = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(output, tensor)
    return output


class NT_Xent(nn.Module):
    def __init__(self, batch_size, temperature):
        super().__init__()
        self.batch_size, self.temperature, self.world_size = batch_size, temperature, dist.get_world_size()

    def forward(self, z_i, z_j):
        z = F.normalize(torch.cat((z_i, z_j), dim=0), dim=1)
        z = torch.cat(GatherLayer.apply(z), dim=0)
        n = 2 * self.batch_size * self.world_size
        sim = (z @ z.T / self.temperature).masked_fill(torch.eye(n, dtype=torch.bool), -1e9)
        own = torch.arange(n).view(self.world_size, 2, self.batch_size)
        return F.cross_entropy(sim, own.flip(1).reshape(-1))


class Pairs(Dataset):
    def __init__(self, count):
        self.images = F.interpolate(torch.randn(count, 3, 3, 3, generator=torch.Generator().manual_seed(111)), size=12)

    def __len__(self):
        return len(self.images)

    def augment(self, x):
        scale = 0.8 + 0.4 * torch.rand(3, 1, 1)
        return (x.flip(2) if torch.rand(1) < 0.5 else x) * scale + 0.15 * torch.randn_like(x)

    def __getitem__(self, index):
        return self.augment(self.images[index]), self.augment(self.images[index])


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                                     nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                                     nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))

    def forward(self, x_i, x_j):
        return self.projector(self.encoder(x_i)), self.projector(self.encoder(x_j))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(SimCLR())
    torch.manual_seed(7 + dist.get_rank())
    dataset = Pairs(256)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, 16, sampler=sampler, drop_last=True)
    criterion = NT_Xent(16, 0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        loss_epoch = 0
        for x_i, x_j in loader:
            optimizer.zero_grad()
            z_i, z_j = model(x_i, x_j)
            loss = criterion(z_i, z_j)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            loss_epoch += loss.item()
        print(f"Epoch [{epoch}/4]\t Loss: {loss_epoch / len(loader):.6f}")
    report([model.module], [optimizer], losses)


if __name__ == "__main__":
    main()
    finish()
