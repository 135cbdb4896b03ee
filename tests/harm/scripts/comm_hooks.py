import torch
from common import batches, finish, report, setup
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP


def own_hook(state, bucket):
    state["calls"] += 1
    future = default_hooks.allreduce_hook(None, bucket)
    return future.then(lambda f: f.value()[0].mul_(1.0))


def main():
    rank = setup(10)
    counted = {"calls": 0}
    for state, hook in (
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_hook),
        (counted, own_hook),
    ):
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        ddp = DDP(model)
        ddp.register_comm_hook(state, hook)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
        losses = []
        for x in batches(rank, 8, 8, 16):
            loss = (ddp(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        report([model], [optimizer], losses, calls=counted)
        del ddp


main()
finish()
