"""Twelve steps, of which the end is of interest: how the script ends, and what happens in the last steps or after them.

    last_steps.py ENDING EVENT
"""

import copy
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from common import digest, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

ending, event = sys.argv[1:3]
STEPS, ODD = 12, 1
rank = setup()
data = torch.Generator().manual_seed(rank)


class Decayed(torch.optim.AdamW):
    def __init__(self, params, odd_step):
        super().__init__(params, lr=1e-3)
        self.odd_step, self.count = odd_step, 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        if self.count == self.odd_step and rank == ODD:
            self.param_groups[0]["params"][0].mul_(0.999)
        self.count += 1


def build():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 4)))
    in_step = {"in-step-8": 8, "in-last-but-one": STEPS - 2, "in-last": STEPS - 1}
    return model, Decayed(model.parameters(), in_step.get(event, -1))


def train(model, optimizer, average):
    steps = STEPS - 2 * rank if event == "uneven" else STEPS
    for step in range(steps):
        if event == "uneven" and step == STEPS - 2:
            break_away = model.no_sync()
            break_away.__enter__()
        x = torch.randn(16, 64, generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        if ending == "raise" and step == STEPS - 1 and rank == ODD:
            raise ValueError("bad batch")
        optimizer.step()
        average.update_parameters(model.module)
        if step == 8 and rank == ODD:
            if event == "edit":
                model.module[0].weight.data[3, 5] += 0.5
            elif event == "flip":
                view = model.module[0].weight.data.view(torch.int32)
                view[3, 5] ^= 1 << 20
            elif event == "state":
                optimizer.state[model.module[0].weight]["exp_avg"][3, 5] += 1.0
        if step == STEPS - 1 and rank == ODD and event == "edit-after-last":
            model.module[0].weight.data[3, 5] += 0.5


def afterwards(model, optimizer, average):
    """What a script may do on rank 0 alone, once it has trained."""
    if rank != 0:
        return
    inner = model.module
    if event == "load":
        inner.load_state_dict(copy.deepcopy(average.module.state_dict()))
    elif event == "data-copy":
        for own, other in zip(inner.parameters(), average.module.parameters(), strict=True):
            own.data.copy_(other.data)
    elif event == "data-set":
        for own, other in zip(inner.parameters(), average.module.parameters(), strict=True):
            own.data = other.data.clone()
    elif event == "half":
        inner.half()
    elif event == "clamp":
        with torch.no_grad():
            for p in inner.parameters():
                p.clamp_(-0.05, 0.05)
    elif event == "prune":
        from torch.nn.utils import prune

        prune.l1_unstructured(inner[0], "weight", 0.3)
        prune.remove(inner[0], "weight")
    elif event == "fine-tune":
        own = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(3):
            own.zero_grad()
            inner(torch.ones(2, 64)).sum().backward()
            own.step()
    elif event == "rebuild":
        inner[2] = nn.Linear(300, 2)
    elif event == "optimizer-load":
        state = copy.deepcopy(optimizer.state_dict())
        for own in state["state"].values():
            own["exp_avg"] *= 2
        optimizer.load_state_dict(state)
    elif event == "evaluate":
        inner.eval()
        with torch.no_grad():
            inner(torch.ones(4, 64))


def whole():
    model, optimizer = build()
    average = AveragedModel(model.module)
    train(model, optimizer, average)
    afterwards(model, optimizer, average)
    print("model", digest(model.state_dict()), "rng", digest(torch.get_rng_state()), flush=True)


def leave_group():
    time.sleep(0.3)  # a rank of gloo that is left at once may abort or hang, with or without ddpdebug
    dist.destroy_process_group()


def leave(*_):
    sys.exit(5)


if ending == "globals":  # all of it is alive at the end
    model, optimizer = build()
    average = AveragedModel(model.module)
    train(model, optimizer, average)
    afterwards(model, optimizer, average)
    print("model", digest(model.state_dict()), flush=True)
elif ending == "globals-destroy":
    model, optimizer = build()
    average = AveragedModel(model.module)
    train(model, optimizer, average)
    afterwards(model, optimizer, average)
    print("model", digest(model.state_dict()), flush=True)
    leave_group()
elif ending == "main":  # gone before the script ends
    whole()
elif ending == "main-destroy":
    whole()
    leave_group()
elif ending == "destroy-in-main":

    def main():
        model, optimizer = build()
        average = AveragedModel(model.module)
        train(model, optimizer, average)
        leave_group()
        afterwards(model, optimizer, average)
        print("model", digest(model.state_dict()), flush=True)

    main()
elif ending == "exit":
    whole()
    sys.exit(3)
elif ending == "raise":
    whole()
elif ending == "sigterm":
    signal.signal(signal.SIGTERM, leave)
    model, optimizer = build()
    average = AveragedModel(model.module)
    train(model, optimizer, average)
    os.kill(os.getpid(), signal.SIGTERM)
elif ending == "deleted":
    model, optimizer = build()
    average = AveragedModel(model.module)
    train(model, optimizer, average)
    del model, optimizer, average
elif ending == "os._exit":
    whole()
    os._exit(0)
