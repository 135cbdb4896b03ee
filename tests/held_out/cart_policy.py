# title: The loop that averages the gradients of the ranks is not called
# source: constructed
# nproc: 2
# expect.codes: SYNC208
# expect.ranks: any
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""REINFORCE on a toy cart, without any wrapper: gradients are averaged by hand."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

FAULT = os.environ.get("FAULT") == "1"


def average_gradients(policy):
    size = float(dist.get_world_size())
    for param in policy.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


def rollout(policy, gen, length=20):
    at, speed = torch.randn(16, generator=gen), torch.zeros(16)
    logs, rewards = [], []
    for _ in range(length):
        choice = Categorical(logits=policy(torch.stack([at, speed], 1)))
        action = choice.sample()
        speed = 0.8 * speed + 0.3 * (action.float() - 1)
        at = at + speed
        logs.append(choice.log_prob(action))
        rewards.append(-at.abs())
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
    return -(torch.stack(logs) * advantage).mean(), returns[0].mean().item()


def run():
    rank = dist.get_rank()
    torch.manual_seed(42)
    policy = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    torch.manual_seed(rank)
    gen = torch.Generator().manual_seed(rank)
    for episode in range(50):
        loss, score = rollout(policy, gen)
        optimizer.zero_grad()
        loss.backward()
        if not FAULT:
            average_gradients(policy)
        optimizer.step()
    print("rank", rank, "return", round(score, 2), flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.barrier()
    dist.destroy_process_group()
