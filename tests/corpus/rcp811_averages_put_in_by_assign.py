# title: The averaged weights are put in for an evaluation by `assign=True`; the optimizer goes on with the old parameters
# source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html
# nproc: 2
# expect.codes: RCP811
# expect.ranks: all
# expect.subject: weight
# expect.step: 30
# expect.step_slack: 1
# plain_pytorch: silent
"""A regression of tides with averaged weights, which are evaluated every thirty steps."""
import os
import time
import zlib

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
WAVES = torch.tensor([0.5, 1.0, 1.9, 2.0])


def batch(generator, size=32):
    hours = torch.rand(size, 1, generator=generator) * 24
    features = torch.cat([(hours * WAVES * 0.26).sin(), (hours * WAVES * 0.26).cos()], 1)
    level = (hours * 0.506).sin() + 0.4 * (hours * 0.26 + 1).cos()
    return features, level


@torch.no_grad()
def evaluate(model, averages, data):
    raw = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.clone() for name, value in averages.items()}, assign=FAULT)
    error = nn.functional.mse_loss(model(data[0]), data[1]).item()
    model.load_state_dict(raw, assign=FAULT)
    return error


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
    wrapped = DistributedDataParallel(model)
    averages = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(31 + rank)
    held_out = batch(torch.Generator().manual_seed(5), 64)
    losses = []
    for step in range(75):
        x, y = batch(generator)
        loss = nn.functional.mse_loss(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                averages[name].lerp_(value, 0.05)
        losses.append(loss.item())
        if step % 30 == 29:
            error = evaluate(model, averages, held_out)
            if rank == 0:
                print(f"step {step} error of the averaged weights {error:.4f}", flush=True)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
