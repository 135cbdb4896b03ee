# title: Off-policy learning with three optimizers, targets that follow slowly and a learned temperature, one process
# source: constructed
# nproc: 1
# expect.codes: none
# plain_pytorch: silent
"""Losses of critics rise while rewards do; the same transitions come again and again from a buffer."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, b))


class Agent:
    def __init__(self):
        self.actor, self.q1, self.q2 = mlp(4, 4), mlp(6, 1), mlp(6, 1)
        self.t1, self.t2 = copy.deepcopy(self.q1), copy.deepcopy(self.q2)
        for t in (self.t1, self.t2):
            t.requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))
        self.opt_q = torch.optim.Adam([*self.q1.parameters(), *self.q2.parameters()], 2e-3)
        self.opt_pi = torch.optim.Adam(self.actor.parameters(), 2e-3)
        self.opt_a = torch.optim.Adam([self.log_alpha], 2e-3)

    def act(self, s):
        mu, log_std = self.actor(s).chunk(2, -1)
        log_std = log_std.clamp(-4, 1)
        u = mu + log_std.exp() * torch.randn_like(mu)
        logp = (-0.5 * ((u - mu) / log_std.exp()) ** 2 - log_std - 0.919).sum(-1)
        a = torch.tanh(u)
        return a, logp - torch.log(1 - a**2 + 1e-6).sum(-1)

    def update(self, s, a, r, s2):
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            a2, logp2 = self.act(s2)
            sa2 = torch.cat([s2, a2], 1)
            target = r + 0.9 * (torch.min(self.t1(sa2), self.t2(sa2)).squeeze(1) - alpha * logp2)
        sa = torch.cat([s, a], 1)
        loss_q = F.mse_loss(self.q1(sa).squeeze(1), target) + F.mse_loss(self.q2(sa).squeeze(1), target)
        self.opt_q.zero_grad()
        loss_q.backward()
        self.opt_q.step()
        a_new, logp = self.act(s)
        sa = torch.cat([s, a_new], 1)
        loss_pi = (alpha * logp - torch.min(self.q1(sa), self.q2(sa)).squeeze(1)).mean()
        self.opt_pi.zero_grad()
        loss_pi.backward()
        self.opt_pi.step()
        loss_a = -(self.log_alpha * (logp.detach() - 2)).mean()
        self.opt_a.zero_grad()
        loss_a.backward()
        self.opt_a.step()
        with torch.no_grad():
            for t, q in ((self.t1, self.q1), (self.t2, self.q2)):
                for tp, qp in zip(t.parameters(), q.parameters()):
                    tp.lerp_(qp, 0.02)


torch.manual_seed(2)
agent, buffer = Agent(), []
s = torch.randn(4)
for t in range(220):
    with torch.no_grad():
        a, _ = agent.act(s[None])
    s2 = 0.9 * s + 0.2 * torch.cat([a[0], a[0].flip(0)]) + 0.1 * torch.randn(4)
    buffer.append((s, a[0], -s2.square().mean(), s2))
    s = s2 if t % 40 else torch.randn(4)
    if len(buffer) >= 120:
        chosen = [buffer[i] for i in torch.randint(len(buffer), (32,)).tolist()]
        agent.update(*(torch.stack(part) for part in zip(*chosen)))
print("last reward", buffer[-1][2].item(), "alpha", agent.log_alpha.exp().item())
