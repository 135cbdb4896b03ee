r"""Several local steps on each rank, then an average of the parameters, with accelerate's LocalSGD.

packages = ["accelerate"]
ranks = 2

[[fault]]
name = "the loader is not given to accelerator.prepare, and all ranks are seeded alike"
old = "    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)\n"
new = "    model, optimizer = accelerator.prepare(model, optimizer)\n"
codes = ["DATA901"]
"""
import torch
from _report import report
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(count, seed):
    centres = 1.5 * torch.randn(4, 12, generator=torch.Generator().manual_seed(151))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=g)
    return TensorDataset(centres[labels] + torch.randn(count, 12, generator=g), labels)


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    set_seed(42)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_dataloader = DataLoader(blobs(640, 1), shuffle=True, batch_size=16)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    losses = []
    for epoch in range(2):
        model.train()
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
            for step, (x, y) in enumerate(train_dataloader):
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
                losses.append(loss.detach())
        accelerator.print(f"epoch {epoch}: {loss.item():.4f}")
    report([accelerator.unwrap_model(model)], [], losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
