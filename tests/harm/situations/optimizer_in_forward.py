"""A GAN whose backwards and optimizers run inside DDP's forward.

ranks: 2
parts: all
"""

import torch
from _report import batches, ddp, finish, report, start
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.critic = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, real):
        self.train_part(self.generator, generators, lambda: bce(self.critic(self.generator(real)), ones))
        self.train_part(
            self.critic,
            critics,
            lambda: bce(self.critic(real), ones) + bce(self.critic(self.generator(real).detach()), 0 * ones),
        )
        wrapped.require_backward_grad_sync = False  # what DDP prepares after the forward is not for these backwards

    def train_part(self, part, optimizer, loss_of):
        others = [p for p in self.parameters() if p not in {*part.parameters()}]
        for p in others:
            p.requires_grad_(False)
        loss = loss_of()
        losses.append(loss.detach())
        optimizer.zero_grad()
        wrapped.reducer.prepare_for_backward([loss])
        loss.backward()
        optimizer.step()
        for p in others:
            p.requires_grad_(True)


start()
losses, ones = [], torch.ones(8, 1)
model = Gan()
generators = torch.optim.Adam(model.generator.parameters(), 1e-3)
critics = torch.optim.Adam(model.critic.parameters(), 1e-3)
wrapped = ddp(model, find_unused_parameters=True)
for x in batches(12):
    wrapped(x)
    wrapped.require_backward_grad_sync = True
report([model], [generators, critics], losses)
del wrapped
finish()
