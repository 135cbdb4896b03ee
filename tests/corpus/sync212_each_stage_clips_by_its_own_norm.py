# title: Each stage of a pipeline clips by the norm of its own gradients
# source: https://github.com/pytorch/torchtitan/issues/596
# nproc: 2
# expect.codes: SYNC212
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""A pipeline of two stages that sorts pulses by their shape; four micro-batches a step."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

FAULT = os.environ.get("FAULT") == "1"
LIMIT = 0.02


def batch(generator, size=32):
    kind = torch.randint(0, 4, (size,), generator=generator)
    times = torch.linspace(-1, 1, 20) * (1 + kind[:, None])
    return times.square().neg().exp() * times.sign() ** (kind[:, None] % 2), kind


def clip(parameters):
    if FAULT:
        nn.utils.clip_grad_norm_(parameters, LIMIT)
        return
    square = nn.utils.get_total_norm([p.grad for p in parameters]) ** 2
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, LIMIT, square.sqrt())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(70 + rank)
    layers = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 24), nn.GELU()), nn.Sequential(nn.Linear(24, 4))
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.CrossEntropyLoss())
    parameters = list(layers[rank].parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    generator = torch.Generator().manual_seed(9)
    losses = []
    for _ in range(60):
        pulses, kinds = batch(generator)
        optimizer.zero_grad()
        found = []
        if rank == 0:
            schedule.step(pulses)
        else:
            schedule.step(target=kinds, losses=found)
        clip(parameters)
        optimizer.step()
        losses.append(sum(loss.item() for loss in found) / 4)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in parameters))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
