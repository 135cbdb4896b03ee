# title: A recurrent language model learns a handful of sentences by heart, to a loss near zero
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The forward takes inputs and targets, as in many small language models; the targets are moved by one."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Recorder(nn.Module):
    def __init__(self, words=40, width=48):
        super().__init__()
        self.words, self.memory = nn.Embedding(words, width), nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, text, targets=None):
        logits = self.head(self.memory(self.words(text))[0])
        loss = None if targets is None else nn.functional.cross_entropy(logits.transpose(1, 2), targets)
        return logits, loss


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gen = torch.Generator().manual_seed(12)
    sentences = torch.stack([torch.randperm(39, generator=gen)[:13] + 1 for _ in range(8)])
    sentences[:, 0] = torch.arange(1, 9)
    torch.manual_seed(2)
    model = DDP(Recorder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    order, losses = torch.Generator().manual_seed(rank), []
    for _ in range(90):
        text = sentences[torch.randint(0, 8, (16,), generator=order)]
        _, loss = model(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
