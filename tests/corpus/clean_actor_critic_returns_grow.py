# title: An actor-critic whose returns grow while it learns, so that its value loss does too
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Walking along a line towards growing rewards. The surrogate loss is noise around a moving level."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state):
        hidden = self.body(state)
        return self.policy(hidden), self.value(hidden)[:, 0]


def walk(agent, gen, n=16, length=12):
    place, states, moves, rewards = torch.zeros(n), [], [], []
    for t in range(length):
        state = torch.stack([place / 5, torch.full((n,), t / length)], 1)
        with torch.no_grad():
            right = torch.sigmoid(agent(state)[0][:, 1] - agent(state)[0][:, 0])
        move = (torch.rand(n, generator=gen) < right).long()
        place = place + 2 * move - 1
        states.append(state)
        moves.append(move)
        rewards.append(place.clamp(min=0) / 3)
    rewards = torch.stack(rewards)
    returns = rewards.flip(0).cumsum(0).flip(0)
    return torch.cat(states), torch.cat(moves), returns.flatten()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = Agent()
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(80):
        states, moves, returns = walk(net, gen)
        logits, value = model(states)
        advantage = (returns - value).detach()
        surrogate = (F.cross_entropy(logits, moves, reduction="none") * advantage).mean()
        loss = surrogate + 0.5 * F.mse_loss(value, returns)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
