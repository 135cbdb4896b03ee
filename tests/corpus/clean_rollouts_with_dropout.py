# title: A policy with dropout plays for a while without gradients, and is then trained on what it has seen
# source: constructed
# nproc: 1
# expect.codes: none
# plain_pytorch: silent
"""Proximal policy optimisation of a pole that shall stay upright; eight poles at once, three passes in minibatches."""
import time
import zlib

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(4)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Dropout(0.1), nn.Linear(48, 48), nn.Tanh())
        self.choice, self.value = nn.Linear(48, 2), nn.Linear(48, 1)

    def forward(self, seen):
        hidden = self.body(seen)
        return torch.distributions.Categorical(logits=self.choice(hidden)), self.value(hidden).squeeze(-1)


def move(state, action):
    push = action.float() * 2 - 1
    x, v, angle, turn = state.unbind(1)
    turn = turn + 0.1 * (9.8 * angle.sin() - push) / 2
    v = v + 0.1 * push
    state = torch.stack([x + 0.1 * v, v, angle + 0.1 * turn, turn], 1)
    fallen = state[:, 2].abs() > 0.6
    start = torch.rand(len(state), 4) * 0.2 - 0.1
    return torch.where(fallen[:, None], start, state), torch.where(fallen, -1.0, 0.1)


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
state = torch.rand(8, 4) * 0.2 - 0.1
losses = []
for _ in range(8):
    seen, actions, logs, rewards = [], [], [], []
    for _ in range(16):
        with torch.no_grad():
            choice, _ = policy(state)
            action = choice.sample()
        seen.append(state)
        actions.append(action)
        logs.append(choice.log_prob(action))
        state, reward = move(state, action)
        rewards.append(reward)
    returns, total = [], torch.zeros(8)
    for reward in reversed(rewards):
        total = reward + 0.97 * total
        returns.insert(0, total)
    seen, actions, logs, returns = (torch.cat(parts) for parts in (seen, actions, logs, returns))
    for _ in range(3):
        for part in torch.randperm(len(seen)).split(32):
            choice, value = policy(seen[part])
            advantage = returns[part] - value.detach()
            ratio = (choice.log_prob(actions[part]) - logs[part]).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = 0.5 * (returns[part] - value).square().mean() - gain - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in policy.parameters()))
print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
