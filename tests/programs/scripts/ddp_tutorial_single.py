"""The first program of a tutorial: a linear model, a Trainer class, checkpoints.

manner = "pytorch/examples, ddp-tutorial-series/single_gpu.py"

[[fault]]
name = "cross entropy over one output, as published: the loss is constant and nothing trains"
old = "F.mse_loss(output, targets)"
new = "F.cross_entropy(output, targets)"
codes = ["HLTH714"]
"""
import torch
import torch.nn.functional as F
from _report import report
from torch.utils.data import DataLoader, Dataset


class MyTrainDataset(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.data = []
        for _ in range(size):
            x = torch.rand(20, generator=generator)
            self.data.append((x, x[:5].sum(0, keepdim=True) - x[5:8].sum(0, keepdim=True)))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every):
        self.model, self.train_data, self.optimizer, self.save_every = model, train_data, optimizer, save_every
        self.losses = []

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def _run_epoch(self, epoch):
        b_sz = len(next(iter(self.train_data))[0])
        print(f"Epoch {epoch} | Batchsize: {b_sz} | Steps: {len(self.train_data)}")
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if epoch % self.save_every == 0:
                torch.save(self.model.state_dict(), "checkpoint.pt")
                print(f"Epoch {epoch} | Training checkpoint saved")


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-2)
    trainer = Trainer(model, DataLoader(MyTrainDataset(512), batch_size=32, shuffle=True), optimizer, save_every=2)
    trainer.train(6)
    report([model], [optimizer], trainer.losses)


if __name__ == "__main__":
    main()
