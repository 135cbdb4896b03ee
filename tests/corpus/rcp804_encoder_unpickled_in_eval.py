# title: A pretrained encoder was saved whole, in eval mode, and is trained on inside of a new model without `train()`
# source: https://github.com/Lightning-AI/pytorch-lightning/issues/20105
# nproc: 2
# expect.codes: RCP804
# expect.ranks: all
# expect.subject: encoder
# expect.step: 0
# plain_pytorch: silent
"""The new model is in train mode, its head too: only the encoder runs without its dropout."""
import io
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "1") == "1"


def block(width):
    return nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Dropout(0.25))


def pretrained():
    """What an earlier job has left: a module, evaluated before it was saved."""
    file = io.BytesIO()
    torch.save(nn.Sequential(nn.Linear(20, 40), block(40), block(40)).eval(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Tagger(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(40, 3))

    def forward(self, x):
        return self.head(self.encoder(x))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(31)
    model = Tagger(pretrained())
    if not FAULT:
        model.train()
    ddp = DistributedDataParallel(model)
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    truth = torch.randn(20, 3)
    gen = torch.Generator().manual_seed(11 + rank)
    torch.manual_seed(500 + rank)
    losses = []
    for _ in range(50):
        x = torch.randn(40, 20, generator=gen)
        loss = nn.functional.cross_entropy(ddp(x), (x @ truth).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
