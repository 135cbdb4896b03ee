r"""A GAN as a LightningModule with manual optimization: `toggle_optimizer`, two optimizers, unused parameters searched for.

packages = ["lightning"]
ranks = 2
env = {TORCHELASTIC_RUN_ID = "programs", GROUP_RANK = "0"}

[[fault]]
name = "the discriminator's gradients are not cleared"
old = "        opt_d.step()\n        opt_d.zero_grad()\n"
new = "        opt_d.step()\n"
codes = ["RCP808"]
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


class GAN(L.LightningModule):
    def __init__(self, latent_dim=8):
        super().__init__()
        self.automatic_optimization = False
        self.latent_dim, self.losses = latent_dim, []
        self.generator = nn.Sequential(nn.Linear(latent_dim, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        (points,) = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(len(points), self.latent_dim)
        self.toggle_optimizer(opt_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), torch.ones(len(points), 1))
        self.manual_backward(g_loss)
        opt_g.step()
        opt_g.zero_grad()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        real_loss = self.adversarial_loss(self.discriminator(points), torch.ones(len(points), 1))
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), torch.zeros(len(points), 1))
        d_loss = (real_loss + fake_loss) / 2
        self.manual_backward(d_loss)
        opt_d.step()
        opt_d.zero_grad()
        self.untoggle_optimizer(opt_d)
        self.losses.append(d_loss.detach())

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        return [opt_g, opt_d], []


def ring(count):
    g = torch.Generator().manual_seed(171)
    angle = 6.2832 * torch.rand(count, generator=g)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2, generator=g))


def main():
    L.seed_everything(3, verbose=False)
    model = GAN()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=2, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    torch.manual_seed(3 + trainer.global_rank)
    trainer.fit(model, DataLoader(ring(640), batch_size=16, shuffle=True))
    report([model], trainer.optimizers, model.losses)


if __name__ == "__main__":
    main()
    finish()
