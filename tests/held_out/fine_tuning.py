# title: A head is trained on a frozen body first, which is then freed, with a new wrapper and a smaller rate
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Two stages as in many courses; the body stays in eval mode during the first."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def body():
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = body(), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x))


def stage(net, params, lr, steps, gen, rule, frozen):
    ddp = DDP(net)
    optimizer = torch.optim.AdamW(params, lr=lr)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in range(steps):
        ddp.train()
        if frozen:
            net.body.eval()
        x = torch.randn(32, 20, generator=gen)
        loss = criterion(ddp(x), (x @ rule).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    rule = torch.randn(20, 4)
    net = Classifier()
    gen = torch.Generator().manual_seed(rank)
    net.body.requires_grad_(False)
    first = stage(net, net.head.parameters(), 5e-3, 40, gen, rule, frozen=True)
    net.body.requires_grad_(True)
    groups = [{"params": net.body.parameters(), "lr": 3e-4}, {"params": net.head.parameters()}]
    second = stage(net, groups, 1e-3, 40, gen, rule, frozen=False)
    print(f"rank {rank} {first:.4f} {second:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
