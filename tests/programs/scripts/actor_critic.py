"""Advantage actor-critic on a pole that wants to be balanced.

manner = "pytorch/examples, reinforcement_learning/actor_critic.py"

[[fault]]
name = "values of shape (n, 1) meet returns of shape (n,)"
old = "saved_actions]).squeeze(1)"
new = "saved_actions])"
codes = ["RCP819"]
where = "value_loss = "
"""
import math
from collections import namedtuple

import torch
import torch.nn.functional as F
from _report import report
from torch import nn, optim
from torch.distributions import Categorical

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Pole:
    """A pole on a cart, in small steps; the episode ends when it has fallen."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self):
        self.x, self.v, self.angle, self.spin = (0.1 * torch.rand(4, generator=self.generator) - 0.05).tolist()
        return self._state()

    def _state(self):
        return torch.tensor([self.x, self.v, self.angle, self.spin])

    def step(self, action):
        force = 10.0 if action == 1 else -10.0
        sine, cosine = math.sin(self.angle), math.cos(self.angle)
        temp = (force + 0.05 * self.spin**2 * sine) / 1.1
        turning = (9.8 * sine - cosine * temp) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        self.x, self.v = self.x + 0.02 * self.v, self.v + 0.02 * (temp - 0.05 * turning * cosine / 1.1)
        self.angle, self.spin = self.angle + 0.02 * self.spin, self.spin + 0.02 * turning
        return self._state(), 1.0, abs(self.x) > 2.4 or abs(self.angle) > 0.21


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 64)
        self.action_head = nn.Linear(64, 2)
        self.value_head = nn.Linear(64, 1)
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def select_action(model, state):
    probs, state_value = model(state)
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
    return action.item()


def finish_episode(model, optimizer, gamma=0.99):
    R, returns = 0, []
    for r in model.rewards[::-1]:
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    policy_losses = []
    for (log_prob, value), R in zip(model.saved_actions, returns):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
    values = torch.stack([action.value for action in model.saved_actions]).squeeze(1)
    value_loss = F.smooth_l1_loss(values, returns, reduction="sum")
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + value_loss
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]
    return loss.detach()


def main():
    torch.manual_seed(543)
    env, model = Pole(543), Policy()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    running_reward, losses = 10.0, []
    for i_episode in range(1, 41):
        state, ep_reward = env.reset(), 0
        for _ in range(1, 200):
            state, reward, done = env.step(select_action(model, state))
            model.rewards.append(reward)
            ep_reward += reward
            if done:
                break
        running_reward = 0.05 * ep_reward + 0.95 * running_reward
        losses.append(finish_episode(model, optimizer))
        if i_episode % 10 == 0:
            print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage reward: {running_reward:.2f}")
    report([model], [optimizer], losses)


if __name__ == "__main__":
    main()
