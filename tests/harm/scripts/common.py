"""What the training scripts of these tests share: set-up, the digest of everything that training leaves behind, the end."""

import gc
import hashlib
import random
import warnings

import numpy as np
import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", message=".*forward_sync_buffers.*")


def setup(seed=0):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(seed)
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    return rank


def digest(value):
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()[:20]


def _feed(found, value):
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
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


def report(models, optimizers, losses, **more):
    print("losses", [float(loss).hex() for loss in losses])
    for i, model in enumerate(models):
        print("model", i, digest(model.state_dict()), digest([p.grad for p in model.parameters()]))
        hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()]
        print("attributes", digest([sorted(vars(m)) for m in model.modules()]), sum(hooks))
    for i, optimizer in enumerate(optimizers):
        print("optimizer", i, digest(optimizer.state_dict()))
    print("rng", digest(torch.get_rng_state()), digest(random.getstate()), digest(np.random.get_state()))
    for name, value in more.items():
        print(name, value)


def finish():
    """End cleanly; the caller has let go of its DDP objects."""
    gc.collect()
    dist.destroy_process_group()


def batches(rank, count, *shape, classes=None):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        x = torch.randn(*shape, generator=generator)
        yield (x, torch.randint(classes, shape[:1], generator=generator)) if classes else x


