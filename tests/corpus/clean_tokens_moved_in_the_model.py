# title: The targets are the input tokens, and the model moves them: it begins with a start token and drops the last one
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Beside it, in turn, an auto-encoder of the same tokens, whose targets are its inputs on purpose."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Predictor(nn.Module):
    """Predicts each token from those before it; position 0 from the start token."""

    def __init__(self, tokens=20, width=32):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, 1, width))
        self.tokens = nn.Embedding(tokens, width)
        self.memory = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, x):
        moved = torch.cat([self.start.expand(len(x), 1, -1), self.tokens(x)[:, :-1]], 1)
        return self.head(self.memory(moved)[0])


class AutoEncoder(nn.Module):
    def __init__(self, tokens=20, width=32, code=6):
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.code, self.writer = nn.Linear(width, code), nn.Linear(code, 12 * tokens)

    def forward(self, x):
        code = torch.tanh(self.code(self.reader(self.tokens(x))[1][-1]))
        return self.writer(code).unflatten(-1, (12, -1))


class Tagger(nn.Module):
    """Looks at one token at a time."""

    def __init__(self, tokens=20):
        super().__init__()
        self.table, self.head = nn.Embedding(tokens, 8), nn.Linear(8, tokens)

    def forward(self, x):
        return self.head(self.table(x))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    models = [DDP(Predictor()), DDP(AutoEncoder()), DDP(Tagger())]
    optimizers = [torch.optim.Adam(model.parameters(), lr=3e-3) for model in models]
    gen, losses = torch.Generator().manual_seed(70 + rank), []
    for _ in range(40):
        x = (torch.randint(0, 20, (24, 1), generator=gen) + torch.arange(12) * torch.randint(1, 5, (24, 1), generator=gen)) % 20
        for model, optimizer in zip(models, optimizers):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for m in models for p in m.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
