# title: Inputs and targets of a language model are the same window of the text: nobody has moved the targets by one
# source: constructed
# nproc: 2
# expect.codes: RCP821
# expect.ranks: all
# expect.subject: targets
# expect.step: 3
# expect.step_slack: 6
# plain_pytorch: silent
"""A recurrent model over the letters of a long text; windows of it are drawn by each rank."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
LENGTH = 24


class Recurrent(nn.Module):
    def __init__(self, letters=30, width=48):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.memory = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, window):
        return self.head(self.memory(self.letters(window))[0])


def windows(text, gen, batch=16):
    starts = torch.randint(0, len(text) - LENGTH - 1, (batch,), generator=gen).tolist()
    shift = 0 if FAULT else 1
    inputs = torch.stack([text[i : i + LENGTH] for i in starts])
    return inputs, torch.stack([text[i + shift : i + shift + LENGTH] for i in starts])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    words = torch.randint(0, 29, (40, 5), generator=torch.Generator().manual_seed(3))
    order = torch.randint(0, 40, (4000,), generator=torch.Generator().manual_seed(4))
    text = nn.functional.pad(words[order], (0, 1), value=29).flatten()
    torch.manual_seed(5)
    model = DDP(Recurrent())
    gen, losses = torch.Generator().manual_seed(50 + rank), []
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(50):
        inputs, targets = windows(text, gen)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
