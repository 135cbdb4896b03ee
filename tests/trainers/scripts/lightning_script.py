"""A LightningModule under a Trainer that starts its two ranks itself, or a Fabric that does."""
import argparse
import hashlib
import json
import os
import sys

import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
parser.add_argument("--precision", default="32-true")
parser.add_argument("--fail-on-rank", type=int)
parser.add_argument("--fabric", action="store_true")
parser.add_argument("--callback", action="store_true")
args = parser.parse_args()


def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 1))


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.told, self.validated = net(), [], []

    def training_step(self, batch, index):
        x, y = batch
        if self.global_rank == args.fail_on_rank and self.global_step == 3:
            raise ValueError("this batch cannot be read")
        loss = torch.nn.functional.mse_loss(self.net(x).float(), y)
        self.told.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(x).float(), y), sync_dist=True)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def data():
    x = torch.randn(144, 8, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    return TensorDataset(x[:112], y[:112]), TensorDataset(x[112:], y[112:])


def tell(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def train():
    training, validation = data()
    model, more = Regression(), []
    if args.callback:
        from ddpdebug.trainers.lightning import DebugCallback

        more = [DebugCallback(on_finding="raise")]
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3 if args.resume else 2, accumulate_grad_batches=3,
        gradient_clip_val=1.0, precision=args.precision, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=".",
        callbacks=[L.pytorch.callbacks.ModelCheckpoint(dirpath="checkpoints", save_last=True), *more],
    )
    trainer.fit(model, DataLoader(training, batch_size=8, shuffle=True), DataLoader(validation, batch_size=8), ckpt_path=args.resume)
    tell(
        rank=trainer.global_rank, steps=trainer.global_step, told=model.told, validated=model.validated,
        weights=digest(model.parameters()), random=digest([torch.get_rng_state()]),
        state=digest(v for s in trainer.optimizers[0].state.values() for v in s.values()),
        callbacks=[type(one).__name__ for one in trainer.callbacks],
    )


def train_by_fabric():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = net(), None
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for x, y in fabric.setup_dataloaders(DataLoader(data()[0], batch_size=8)):
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    tell(rank=fabric.global_rank, weights=digest(model.parameters()))


if __name__ == "__main__":
    L.seed_everything(7, verbose=False)
    (train_by_fabric if args.fabric else train)()
