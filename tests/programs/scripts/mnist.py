r"""A small convolutional network on digits, tested after every epoch.

manner = "pytorch/examples, mnist"

[[fault]]
name = "model.train() stands before the epochs instead of in train(), so that it is not called after the first test"
old = "    model.train()\n    for batch_idx"
new = "    for batch_idx"
codes = ["RCP804"]
"""
import argparse

import torch
import torch.nn.functional as F
from _report import report
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 25, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(torch.flatten(x, 1))
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count, seed):
    """Each class is a blurred prototype; samples are noisy copies of it."""
    prototypes = torch.randn(10, 1, 14, 14, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = prototypes[labels] + 0.6 * torch.randn(count, 1, 14, 14, generator=generator)
    return torch.utils.data.TensorDataset((images - images.mean()) / images.std(), labels)


def train(model, loader, optimizer, epoch, losses):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if batch_idx % 10 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(loader.dataset)}] Loss: {loss.item():.6f}")


def test(model, loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view_as(output.argmax(dim=1, keepdim=True))).sum().item()
    print(f"Test set: Average loss: {test_loss / len(loader.dataset):.4f}, Accuracy: {correct}/{len(loader.dataset)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train_loader = torch.utils.data.DataLoader(digits(1024, 1), batch_size=64, shuffle=True)
    test_loader = torch.utils.data.DataLoader(digits(256, 2), batch_size=128)
    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    model.train()
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer, epoch, losses)
        test(model, test_loader)
        scheduler.step()
    report([model], [optimizer], losses)


if __name__ == "__main__":
    main()
