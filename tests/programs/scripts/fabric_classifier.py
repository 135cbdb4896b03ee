r"""A plain loop on Fabric: setup, setup_dataloaders, backward, clipping, and an evaluation reduced over the ranks.

packages = ["lightning"]
ranks = 2
env = {TORCHELASTIC_RUN_ID = "programs", GROUP_RANK = "0"}

[[fault]]
name = "the batch runs through the model that was not set up"
old = "            output = model(data)\n            loss ="
new = "            output = net(data)\n            loss ="
codes = ["SYNC202", "SYNC208"]
"""
import logging
import warnings

import torch
import torch.nn.functional as F
from _report import finish, report
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)
from lightning.fabric import Fabric, seed_everything  # noqa: E402


def digits(count, seed):
    prototypes = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(181))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 8, (count,), generator=g)
    return TensorDataset(prototypes[labels] + 0.8 * torch.randn(count, 1, 8, 8, generator=g), labels)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    seed_everything(1, verbose=False)
    train_loader, test_loader = DataLoader(digits(512, 1), 16, shuffle=True), DataLoader(digits(128, 2), 32)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 8))
    model, optimizer = fabric.setup(net, optim.Adam(net.parameters(), lr=1e-3))
    torch.manual_seed(1 + fabric.global_rank)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(1, 4):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            output = model(data)
            loss = F.cross_entropy(output, target)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            losses.append(loss.detach())
        scheduler.step()
        model.eval()
        total = 0
        with torch.no_grad():
            for data, target in test_loader:
                total += F.cross_entropy(model(data), target)
        fabric.print(f"epoch {epoch}: loss {loss.item():.4f} test {fabric.all_reduce(total).item() / len(test_loader):.4f}")
    report([net], [], losses)


if __name__ == "__main__":
    main()
    finish()
