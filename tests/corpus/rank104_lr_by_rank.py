# title: The linear scaling rule multiplies the learning rate by the rank instead of the world size
# source: constructed
# nproc: 4
# expect.codes: RANK104, RANK101
# expect.ranks: any
# expect.subject: lr
# expect.step: 0
# plain_pytorch: silent
"""An autoencoder of short periodic signals."""
import argparse
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-lr", type=float, default=0.001)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=40)
    return parser.parse_args()


def scaled_lr(base):
    factor = dist.get_rank() + 1 if FAULT else dist.get_world_size()
    return base * factor


def signals(gen, count=32):
    freq = 1 + 2 * torch.rand(count, 1, generator=gen)
    shift = 6.28 * torch.rand(count, 1, generator=gen)
    return torch.sin(freq * torch.linspace(0, 6.28, 30) + shift)


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(90)
    encoder = nn.Sequential(nn.Linear(30, args.width), nn.ELU(), nn.Linear(args.width, 4))
    decoder = nn.Sequential(nn.Linear(4, args.width), nn.ELU(), nn.Linear(args.width, 30))
    model = DDP(nn.Sequential(encoder, decoder))
    opt = torch.optim.RMSprop(model.parameters(), lr=scaled_lr(args.base_lr))
    gen = torch.Generator().manual_seed(3000 + rank)
    log = []
    for _ in range(args.steps):
        x = signals(gen)
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        opt.step()
        log.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={log[0]:.4f} final={sum(log[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
