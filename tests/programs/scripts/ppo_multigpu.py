"""Proximal policy optimisation; each rank has environments of its own, gradients are reduced by hand in one call.

manner = "vwxyzjn/cleanrl, ppo_atari_multigpu.py"
ranks = 2

[[fault]]
name = "the seed contains the rank before the agent is made: every rank has an agent of its own"
old = "torch.manual_seed(seed - rank)  # the same agent on all ranks"
new = "torch.manual_seed(seed)"
codes = ["RANK101"]
"""
import math

import numpy as np
import torch
import torch.distributed as dist
from _report import finish, report
from torch import nn, optim
from torch.distributions.categorical import Categorical

NUM_ENVS, NUM_STEPS, UPDATES, EPOCHS, MINIBATCHES = 8, 32, 8, 2, 2


class Poles:
    """Several poles on carts; one that has fallen starts again."""

    def __init__(self, count, seed):
        self.rng, self.count = np.random.default_rng(seed), count

    def reset(self):
        self.state = self.rng.uniform(-0.05, 0.05, (self.count, 4))
        return self.state.astype(np.float32)

    def step(self, actions):
        x, v, angle, spin = self.state.T
        force = np.where(actions == 1, 10.0, -10.0)
        temp = (force + 0.05 * spin**2 * np.sin(angle)) / 1.1
        turning = (9.8 * np.sin(angle) - np.cos(angle) * temp) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        push = temp - 0.05 * turning * np.cos(angle) / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turning], 1)
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.21)
        self.state[done] = self.rng.uniform(-0.05, 0.05, (done.sum(), 4))
        return self.state.astype(np.float32), np.ones(self.count, np.float32), done.astype(np.float32)


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(layer_init(nn.Linear(4, 32)), nn.Tanh(), layer_init(nn.Linear(32, 32)), nn.Tanh())
        self.actor, self.critic = layer_init(nn.Linear(32, 2), std=0.01), layer_init(nn.Linear(32, 1), std=1)

    def get_value(self, x):
        return self.critic(self.network(x))

    def get_action_and_value(self, x, action=None):
        hidden = self.network(x)
        probs = Categorical(logits=self.actor(hidden))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed = 1 + rank
    np.random.seed(seed)
    torch.manual_seed(seed - rank)  # the same agent on all ranks
    agent = Agent()
    torch.manual_seed(seed)
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    envs = Poles(NUM_ENVS, seed)
    obs, actions = torch.zeros(NUM_STEPS, NUM_ENVS, 4), torch.zeros(NUM_STEPS, NUM_ENVS)
    logprobs, rewards, dones, values = (torch.zeros(NUM_STEPS, NUM_ENVS) for _ in range(4))
    next_obs, next_done = torch.tensor(envs.reset()), torch.zeros(NUM_ENVS)
    losses = []
    for update in range(1, UPDATES + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / UPDATES) * 2.5e-3
        for step in range(NUM_STEPS):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            next_obs, reward, done = envs.step(action.numpy())
            rewards[step], next_obs, next_done = torch.tensor(reward), torch.tensor(next_obs), torch.tensor(done)
        with torch.no_grad():
            next_value = agent.get_value(next_obs).flatten()
            advantages, lastgaelam = torch.zeros_like(rewards), 0
            for t in reversed(range(NUM_STEPS)):
                nonterminal = 1.0 - (next_done if t == NUM_STEPS - 1 else dones[t + 1])
                nextvalues = next_value if t == NUM_STEPS - 1 else values[t + 1]
                delta = rewards[t] + 0.99 * nextvalues * nonterminal - values[t]
                advantages[t] = lastgaelam = delta + 0.99 * 0.95 * nonterminal * lastgaelam
            returns = advantages + values
        b_obs, b_logprobs, b_actions = obs.reshape(-1, 4), logprobs.reshape(-1), actions.reshape(-1)
        b_advantages, b_returns, b_values = advantages.reshape(-1), returns.reshape(-1), values.reshape(-1)
        b_inds = np.arange(NUM_STEPS * NUM_ENVS)
        for _ in range(EPOCHS):
            np.random.shuffle(b_inds)
            for mb_inds in np.split(b_inds, MINIBATCHES):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions.long()[mb_inds])
                ratio = (newlogprob - b_logprobs[mb_inds]).exp()
                mb_advantages = b_advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
                newvalue = newvalue.view(-1)
                clipped = b_values[mb_inds] + torch.clamp(newvalue - b_values[mb_inds], -0.2, 0.2)
                v_loss = 0.5 * torch.max((newvalue - b_returns[mb_inds]) ** 2, (clipped - b_returns[mb_inds]) ** 2).mean()
                loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                if world_size > 1:
                    all_grads = torch.cat([p.grad.view(-1) for p in agent.parameters() if p.grad is not None])
                    dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
                    offset = 0
                    for param in agent.parameters():
                        if param.grad is not None:
                            piece = all_grads[offset : offset + param.numel()]
                            param.grad.data.copy_(piece.view_as(param.grad.data) / world_size)
                            offset += param.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.detach())
        print(f"update {update}: value loss {v_loss.item():.4f} falls {int(dones.sum())}")
    report([agent], [optimizer], losses)


if __name__ == "__main__":
    main()
    finish()
