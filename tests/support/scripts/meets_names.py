"""A short training that meets what ddpdebug uses private names of torch for; prints the bits of its weights."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode


class Net(nn.Module):
    """Divides by zero where its input is zero."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.two(self.drop(torch.relu(self.norm(self.one(x)))))
        return y + 0 * x.abs().sum().log()


def report(title, tensors):
    bits = b"".join(bytes(t.detach().contiguous().view(-1).view(torch.uint8).numpy()) for t in tensors)
    print(title, hashlib.sha256(bits).hexdigest())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    data = torch.randn(48, 8)
    loader = DataLoader(TensorDataset(data, torch.arange(48) % 4), batch_size=8)
    model = Net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    parts = [ConstantLR(optimizer, 0.5, 2), StepLR(optimizer, 2)]
    scheduler = SequentialLR(optimizer, parts, [2])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for epoch in range(2):
        for i, (x, y) in enumerate(loader):
            x = torch.zeros_like(x) if (epoch, i) == (1, 5) else x
            optimizer.zero_grad()
            loss = functional.cross_entropy(ddp(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            report("loss", [loss, *model.parameters()])
        ddp.eval()
        with torch.no_grad(), FlopCounterMode(display=False) as flops:
            report("validation", [functional.cross_entropy(ddp(x), y) for x, y in loader])
        print(flops.get_total_flops())
        ddp.train()
        if epoch == 0:
            with ddp.join():
                for x, y in loader:
                    functional.cross_entropy(ddp(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    break
    report("weights", [*model.state_dict().values()])
    report("random", [torch.get_rng_state()])
    del ddp
    dist.barrier()
    dist.destroy_process_group()


main()
