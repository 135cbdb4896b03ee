"""A variational autoencoder with a summed loss.

manner = "pytorch/examples, vae"

[[fault]]
name = "the decoder keeps its sigmoid when the loss is changed to the one that takes logits"
old = "        return self.fc4(h3)"
new = "        return torch.sigmoid(self.fc4(h3))"
codes = ["RCP802"]
where = "F.binary_cross_entropy_with_logits("
"""
import torch
from _report import report
from torch import nn, optim
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self, pixels=144, hidden=64, latent=8):
        super().__init__()
        self.fc1 = nn.Linear(pixels, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, pixels)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return self.fc4(h3)

    def forward(self, x):
        mu, logvar = self.encode(x.view(x.size(0), -1))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy_with_logits(recon_x, x.view(x.size(0), -1), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def blobs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    centre = 12 * torch.rand(count, 2, 1, 1, generator=generator)
    rows = torch.arange(12.0).view(1, 12, 1)
    columns = torch.arange(12.0).view(1, 1, 12)
    distance = (rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2
    return torch.exp(-distance / 6).unsqueeze(1)


def main():
    torch.manual_seed(1)
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    train_loader = torch.utils.data.DataLoader(blobs(960, 1), batch_size=64, shuffle=True)
    test_loader = torch.utils.data.DataLoader(blobs(128, 2), batch_size=64)
    losses = []
    for epoch in range(1, 5):
        model.train()
        train_loss = 0
        for data in train_loader:
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            losses.append(loss.detach())
        print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")
        model.eval()
        test_loss = 0
        with torch.no_grad():
            for data in test_loader:
                recon_batch, mu, logvar = model(data)
                test_loss += loss_function(recon_batch, data, mu, logvar).item()
        print(f"====> Test set loss: {test_loss / len(test_loader.dataset):.4f}")
        with torch.no_grad():
            sample = torch.sigmoid(model.decode(torch.randn(16, 8)))
            print(f"sample {sample.mean().item():.6f}")
    report([model], [optimizer], losses)


if __name__ == "__main__":
    main()
