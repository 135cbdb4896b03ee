import torch
from common import batches, finish, report, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank = setup()
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(16, 10),
    )
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=24)
    losses = []
    for step, (x, y) in enumerate(batches(rank, 24, 8, 3, 12, 12, classes=10)):
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if step == 12:
            ddp.eval()
            with torch.no_grad():
                losses.append(F.cross_entropy(ddp(x), y))
            ddp.train()
            saved = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}
            ddp.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
    report([model], [optimizer], losses)


main()
finish()
