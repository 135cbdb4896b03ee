# title: Models that draw in eval mode because they are made so: denoising, variational, masked, with guarded noise
# source: constructed
# nproc: 1
# expect.codes: none
# plain_pytorch: silent
"""Three auto-encoders of small spectra, each evaluated with the noise that it is about, and a guarded classifier."""
import time
import zlib

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)


class Denoising(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.noise = 0.3
        self.net = nn.Sequential(nn.Linear(size, 40), nn.ReLU(), nn.Linear(40, size))

    def forward(self, x):
        return self.net(x + self.noise * torch.randn_like(x))


class Variational(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.encoder, self.mean, self.log_var = nn.Linear(size, 40), nn.Linear(40, 6), nn.Linear(40, 6)
        self.decoder = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, size))

    def forward(self, x):
        h = F.relu(self.encoder(x))
        mean, log_var = self.mean(h), self.log_var(h)
        eps = torch.randn_like(mean)
        z = mean + eps * torch.exp(0.5 * log_var)
        return self.decoder(z), mean, log_var


class Masked(nn.Module):
    def __init__(self, size=32, share=0.25):
        super().__init__()
        self.share = share
        self.net = nn.Sequential(nn.Linear(2 * size, 40), nn.ReLU(), nn.Linear(40, size))

    def forward(self, x):
        kept = (torch.rand_like(x) > self.share).float()
        return self.net(torch.cat([x * kept, kept], 1)), kept


class Guarded(nn.Module):
    def __init__(self, size=32, p=0.1):
        super().__init__()
        self.p, self.inner, self.out = p, nn.Linear(size, 40), nn.Linear(40, 3)

    def forward(self, x):
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        h = F.dropout(F.relu(self.inner(x)), self.p, self.training)
        keep = 1 - self.p
        h = h * (torch.rand(len(h), 1) < keep).float() / keep if self.training else h
        return self.out(h)


def spectra(gen, n=64):
    kind = torch.randint(0, 3, (n,), generator=gen)
    centre = 6 + 10 * kind[:, None] + 2 * torch.rand(n, 1, generator=gen)
    return torch.exp(-((torch.arange(32) - centre) ** 2) / 12) + 0.02 * torch.randn(n, 32, generator=gen), kind


def loss_of(model, x, kind):
    out = model(x)
    if isinstance(model, Denoising):
        return F.mse_loss(out, x)
    if isinstance(model, Variational):
        image, mean, log_var = out
        return F.mse_loss(image, x) - 0.001 * (1 + log_var - mean.square() - log_var.exp()).mean()
    if isinstance(model, Masked):
        image, kept = out
        return ((image - x).square() * (1 - kept)).sum() / (1 - kept).sum()
    return F.cross_entropy(out, kind)


torch.manual_seed(8)
gen = torch.Generator().manual_seed(21)
held_out = [spectra(torch.Generator().manual_seed(800 + i)) for i in range(3)]
for kind in (Denoising, Variational, Masked, Guarded):
    model = kind()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        model.train()
        for _ in range(20):
            loss = loss_of(model, *spectra(gen))
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            error = sum(loss_of(model, *batch).item() for batch in held_out) / len(held_out)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
