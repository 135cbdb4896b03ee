"""A generator and a discriminator in one process, convolutional, trained in turns.

manner = "pytorch/examples, dcgan"

[[fault]]
name = "the losses are kept for a plot, with their graphs"
old = "G_losses.append(errG.item())"
new = "G_losses.append(errG)"
codes = ["MEM403"]
"""
import torch
from _report import report
from torch import nn, optim


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz=16, ngf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self, ndf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1, 1).squeeze(1)


def stripes(count):
    generator = torch.Generator().manual_seed(3)
    phase = 6.3 * torch.rand(count, 1, 1, 1, generator=generator)
    speed = 0.5 + torch.rand(count, 1, 1, 1, generator=generator)
    return torch.tanh(2 * torch.sin(speed * torch.arange(16.0) + phase)).expand(count, 1, 16, 16).contiguous()


def main():
    torch.manual_seed(5)
    loader = torch.utils.data.DataLoader(stripes(640), batch_size=32, shuffle=True)
    netG, netD = Generator(), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(16, 16, 1, 1)
    real_label, fake_label = 1, 0
    optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    G_losses, D_losses = [], []
    for epoch in range(3):
        for i, data in enumerate(loader):
            # (1) the discriminator: real, then fake
            netD.zero_grad()
            label = torch.full((data.size(0),), float(real_label))
            output = netD(data)
            errD_real = criterion(output, label)
            errD_real.backward()
            noise = torch.randn(data.size(0), 16, 1, 1)
            fake = netG(noise)
            label.fill_(fake_label)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
            errD = errD_real + errD_fake
            optimizerD.step()
            # (2) the generator: its samples as real ones
            netG.zero_grad()
            label.fill_(real_label)
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
            optimizerG.step()
            D_losses.append(errD.item())
            G_losses.append(errG.item())
            if i % 10 == 0:
                print(f"[{epoch}/3][{i}/{len(loader)}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")
        with torch.no_grad():
            print(f"fake {netG(fixed_noise).mean().item():.6f}")
    report([netG, netD], [optimizerG, optimizerD], map(torch.as_tensor, G_losses))


if __name__ == "__main__":
    main()
