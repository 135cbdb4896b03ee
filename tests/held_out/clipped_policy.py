# title: Proximal policy optimisation with four passes over each rollout and an early end when the policy has moved far
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The number of passes is decided on all ranks together; rewards and losses jump about, as they do."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel as DDP


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.full((1,), -0.5))

    def forward(self, obs, action=None):
        policy = Normal(self.actor(obs), self.log_std.exp())
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action).sum(-1), policy.entropy().mean(), self.critic(obs).squeeze(-1)


@torch.no_grad()
def play(agent, steps=24, robots=12):
    obs = torch.randn(robots, 3)
    memory = []
    for _ in range(steps):
        action, logp, _, value = agent(obs)
        reward = -(obs[:, 0] - action[:, 0]) ** 2
        memory.append((obs, action, logp, value, reward))
        obs = torch.randn(robots, 3) * 0.7 + 0.3 * obs
    obs, action, logp, value, reward = (torch.cat(part) for part in zip(*memory))
    return obs, action, logp, reward, reward - value


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
agent = ActorCritic()
ddp = DDP(agent)
torch.manual_seed(1 + rank)
optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3, eps=1e-5)
for update in range(14):
    obs, action, logp, returns, advantage = play(agent)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for epoch in range(4):
        for index in torch.randperm(len(obs)).chunk(2):
            _, new_logp, entropy, value = ddp(obs[index], action[index])
            ratio = (new_logp - logp[index]).exp()
            gain = torch.min(ratio * advantage[index], ratio.clamp(0.8, 1.2) * advantage[index]).mean()
            loss = -gain + 0.5 * (value - returns[index]).square().mean() - 0.001 * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
        moved = (logp[index] - new_logp.detach()).mean()
        dist.all_reduce(moved)
        if moved / world > 0.05:
            break
print(f"rank {rank} reward {returns.mean().item():.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
