# title: Each rank fits a throw-away probe to its own fold of the features now and then, and a temperature at the end
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A classifier of scents under DDP, whose features are probed by a linear layer on each rank: cross-validation."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batch(generator, size=28):
    scent = torch.rand(size, 9, generator=generator)
    return scent, (scent[:, :3].argmax(1) + 3 * (scent[:, 3] > 0.5)).long()


def accuracy_of_probe(features, wanted, held_out):
    probe = nn.Linear(features.shape[1], 2)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.2, momentum=0.9)
    for _ in range(16):
        loss = nn.functional.cross_entropy(probe(features[~held_out]), wanted[~held_out])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (probe(features[held_out]).argmax(1) == wanted[held_out]).float().mean()
    dist.all_reduce(right)
    return right.item() / dist.get_world_size()


def temperature_of(logits, labels):
    scale = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.LBFGS([scale], lr=0.3, max_iter=10)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits * scale.exp(), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    mean = scale.detach().exp()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(23)
    body = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 12), nn.SiLU())
    model = DistributedDataParallel(nn.Sequential(body, nn.Linear(12, 6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(40 + rank)
    scents, labels = batch(torch.Generator().manual_seed(1), 240)
    held_out = torch.arange(240) % dist.get_world_size() == rank
    losses = []
    for step in range(80):
        x, y = batch(generator)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 24:
            with torch.no_grad():
                features = body(scents)
            found = accuracy_of_probe(features, (labels > 2).long(), held_out)
            if rank == 0:
                print(f"step {step} loss {losses[-1]:.4f} probe {found:.3f}", flush=True)
    with torch.no_grad():
        logits = model.module(scents[held_out])
    found = temperature_of(logits, labels[held_out])
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} {found:.2f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
