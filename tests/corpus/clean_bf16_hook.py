# title: A communication hook that sends gradients in bfloat16 and divides before it sends
# source: https://pytorch.org/docs/stable/ddp_comm_hooks
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The reduced gradient is the mean of the ranks' gradients only up to bfloat16 rounding."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def bf16_mean(world, bucket):
    """torch's bf16_compress_hook asks for NCCL, so this job has its own."""
    compressed = bucket.buffer().to(torch.bfloat16).div_(world)
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda f: bucket.buffer().copy_(f.value()[0]))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(41)
    items = torch.randn(50, 6)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1)))
    model.register_comm_hook(dist.get_world_size(), bf16_mean)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(70):
        basket = torch.randint(0, 50, (64, 3), generator=gen)
        worth = items[basket].sum((1, 2))[:, None] / 4
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(basket), worth)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
