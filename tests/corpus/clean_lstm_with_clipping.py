# title: An LSTM language model whose gradients are clipped now and then
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Brackets that open and close; the state is detached between segments."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def brackets(gen, n=16, length=24):
    steps = torch.randint(0, 2, (n, length + 1), generator=gen)
    depth = torch.zeros(n, dtype=torch.long)
    text = []
    for t in range(length + 1):
        opens = (steps[:, t] == 1) & (depth < 4) | (depth == 0)
        depth = depth + torch.where(opens, 1, -1)
        text.append(torch.where(opens, depth, depth + 5))
    return torch.stack(text, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.lstm = nn.LSTM(16, 40, num_layers=2, batch_first=True)
        self.head = nn.Linear(40, 10)

    def forward(self, text, state):
        hidden, state = self.lstm(self.embed(text), state)
        return self.head(hidden), state


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(rank)
    losses, state = [], None
    for _ in range(60):
        text = brackets(gen)
        logits, state = model(text[:, :-1], state)
        state = tuple(s.detach() for s in state)
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
