"""What the situations share: seeds, small batches, the digest of everything that training leaves behind."""

import gc
import hashlib
import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def start(seed=0):
    """Seed everything; one thread, so that sums have one order."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def group():
    """Join the ranks of this job and return the rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def ddp(model, **options):
    """Wrap a model; joins the ranks of this job where that has not happened."""
    if not dist.is_initialized():
        group()
    return DistributedDataParallel(model, **options)


def finish():
    """Leave the group; the caller has let go of its DDP objects, which could abort the process otherwise."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def batches(count=6, rows=8, columns=16, seed=100):
    """Yield `count` batches that do not depend on the global generator."""
    generator = torch.Generator().manual_seed(seed + int(os.environ.get("RANK", "0")))
    for _ in range(count):
        yield torch.randn(rows, columns, generator=generator, dtype=torch.float32)


def train(model, optimizer, data=None, loss_of=None):
    """Train in the plain way and return the losses."""
    losses = []
    for x in batches() if data is None else data:
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().mean() if loss_of is None else loss_of(out)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def digest(value):
    """Return the bits of tensors, numbers and nested containers of them as one short word."""
    found = hashlib.sha256()
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        _feed(found, value)
    return found.hexdigest()[:16]


def _feed(found, value):
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.layout is not torch.strided:
            value = value.to_dense()
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        value = value.contiguous()
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(bytes(value.view(-1).view(torch.uint8).numpy()) if value.numel() else b"")
    elif isinstance(value, dict):
        for key in value:
            found.update(repr(key).encode())
            _feed(found, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(found, item)
    elif isinstance(value, np.ndarray):
        found.update(value.tobytes())
    else:
        found.update(repr(value).encode())


def report(models=(), optimizers=(), losses=(), **more):
    """Print what training has left behind: weights, buffers, gradients, optimizer and random state, losses."""
    lines = [f"losses {[float(loss.detach()).hex() for loss in losses]}"]
    for i, model in enumerate(models):
        lines.append(f"model {i} {digest(model.state_dict())} {digest([p.grad for p in model.parameters()])}")
        hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()]
        lines.append(f"attributes {i} {digest([sorted(vars(m)) for m in model.modules()])} hooks {sum(hooks)}")
    for i, optimizer in enumerate(optimizers):
        lines.append(f"optimizer {i} {digest(optimizer.state_dict())}")
    lines.append(f"random {digest(torch.get_rng_state())} {digest(random.getstate())} {digest(np.random.get_state())}")
    lines += [f"{name} {value}" for name, value in more.items()]
    # in one piece: under torchrun several ranks write to the same place
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def at_most(name, value, more):
    """Print a measured value; attached it may exceed the plain one by `more`."""
    print("~", name, int(value), int(more))


def listening():
    """Return the ports on which this process listens; other processes of the machine may hold more."""
    mine = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    lines = [line.split() for line in open("/proc/self/net/tcp").readlines()[1:]]
    return {
        int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in mine
    }
