r"""A pretrained body with a new head, of which the head alone is trained, and the best weights are kept.

manner = "pytorch/tutorials, transfer_learning_tutorial.py, feature extraction"

[[fault]]
name = "the filter leaves the normalisation layers trainable and freezes the new head"
old = "for name, param in model.named_parameters():\n        param.requires_grad = name.startswith(\"fc\")"
new = "for name, param in model.named_parameters():\n        param.requires_grad = \"bn\" in name"
codes = ["RCP812"]
"""
import copy

import torch
import torch.nn.functional as F
from _report import report
from torch import nn, optim
from torch.optim import lr_scheduler


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.down(x))


class ResNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer1, self.layer2 = Block(3, 12, 1), Block(12, 24, 2)
        self.fc = nn.Linear(24, classes)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def insects(count, classes, seed):
    prototypes = F.interpolate(torch.randn(classes, 3, 3, 3, generator=torch.Generator().manual_seed(classes)), size=12)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    return torch.utils.data.TensorDataset(prototypes[labels] + 0.5 * torch.randn(count, 3, 12, 12, generator=generator), labels)


def train_model(model, criterion, optimizer, scheduler, dataloaders, losses, num_epochs):
    best, best_acc = copy.deepcopy(model.state_dict()), 0.0
    for epoch in range(num_epochs):
        for phase in ["train", "val"]:
            model.train(phase == "train")
            running_loss = running_corrects = 0
            for inputs, labels in dataloaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                        losses.append(loss.detach())
                running_loss += loss.item() * inputs.size(0)
                running_corrects += (outputs.argmax(1) == labels).sum().item()
            if phase == "train":
                scheduler.step()
            size = len(dataloaders[phase].dataset)
            print(f"{epoch} {phase} Loss: {running_loss / size:.4f} Acc: {running_corrects / size:.4f}")
            if phase == "val" and running_corrects / size > best_acc:
                best, best_acc = copy.deepcopy(model.state_dict()), running_corrects / size
    model.load_state_dict(best)
    return model


def pretrained():
    """What would be downloaded: a body that has seen a task with more classes."""
    model = ResNet(8)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data, labels = insects(384, 8, 9).tensors
    for _ in range(3):
        for x, y in zip(data.split(64), labels.split(64)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def main():
    torch.manual_seed(0)
    model = pretrained()
    model.fc = nn.Linear(model.fc.in_features, 3)
    for name, param in model.named_parameters():
        param.requires_grad = name.startswith("fc")
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    dataloaders = {
        "train": torch.utils.data.DataLoader(insects(256, 3, 1), batch_size=16, shuffle=True),
        "val": torch.utils.data.DataLoader(insects(96, 3, 2), batch_size=32),
    }
    losses = []
    model = train_model(model, criterion, optimizer, scheduler, dataloaders, losses, num_epochs=4)
    report([model], [optimizer], losses)


if __name__ == "__main__":
    main()
