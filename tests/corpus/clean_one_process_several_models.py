# title: One process without DDP: a GAN, a teacher in eval mode, an average of the generator, a recurrent cell
# source: constructed
# nproc: 1
# expect.codes: none
# plain_pytorch: silent
"""Several models that train and that do not, in one loop."""
import copy
import time
import zlib

import torch
from torch import nn

BCE = nn.BCEWithLogitsLoss()


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.state, self.step, self.out = nn.Linear(16, 16), nn.Linear(4, 16), nn.Linear(16, 16)

    def forward(self, noise):
        h = noise.new_zeros(noise.shape[0], 16)
        for t in range(noise.shape[1]):
            h = torch.tanh(self.state(h) + self.step(noise[:, t]))
        return self.out(h)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(2)
    generator = Cell()
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
    average = copy.deepcopy(generator).requires_grad_(False)
    teacher = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).requires_grad_(False).eval()
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    one, zero = torch.ones(32, 1), torch.zeros(32, 1)
    losses = []
    for step in range(60):
        with torch.no_grad():
            real = teacher(torch.randn(32, 16) + 1)
        critic.zero_grad()
        loss = BCE(critic(real), one)
        loss.backward()
        fake = generator(torch.randn(32, 3, 4))
        BCE(critic(fake.detach()), zero).backward()
        opt_c.step()
        generator.zero_grad()
        BCE(critic(fake), one).backward()
        opt_g.step()
        losses.append(loss.item())
        with torch.no_grad():
            for a, p in zip(average.parameters(), generator.parameters()):
                a.lerp_(p, 0.05)
        if step % 20 == 19:
            average.eval()
            with torch.no_grad():
                for _ in range(4):
                    average(torch.randn(8, 3, 4))
    models = (generator, critic, average)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for m in models for p in m.parameters()))
    print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
