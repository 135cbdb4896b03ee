"""A LightningModule on a backbone, Trainer with DDP, validation after every epoch, a schedule per epoch.

packages = ["lightning"]
ranks = 2
env = {TORCHELASTIC_RUN_ID = "programs", GROUP_RANK = "0"}

[[fault]]
name = "the layers of the backbone stand in a plain list"
old = "self.layers = nn.ModuleList(layers)"
new = "self.layers = layers"
codes = ["RCP817"]
"""
import logging
import warnings

import torch
import torch.nn.functional as F
from _report import finish, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)
import lightning as L  # noqa: E402


class Backbone(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        layers = [nn.Linear(64, hidden), nn.Linear(hidden, hidden)]
        self.layers = nn.ModuleList(layers)
        self.out = nn.Linear(hidden, 6)

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.out(x)


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.losses = Backbone(), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.backbone(x), y)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self.backbone(x), y), on_step=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


def digits(count, seed):
    prototypes = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(161))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 6, (count,), generator=g)
    return TensorDataset(prototypes[labels] + torch.randn(count, 1, 8, 8, generator=g), labels)


def main():
    L.seed_everything(7, verbose=False)
    model = LitClassifier()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(digits(512, 1), batch_size=16, shuffle=True), DataLoader(digits(128, 2), batch_size=32))
    print({name: value.item() for name, value in sorted(trainer.callback_metrics.items())})
    report([model], trainer.optimizers, model.losses)


if __name__ == "__main__":
    main()
    finish()
