# title: The features of every sample are computed in the first pass and kept; the passes after it only read them
# source: https://docs.monai.io/en/stable/data.html#cachedataset
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Host memory grows in a straight line for 140 steps, and from then on not at all."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    weight = torch.randn(48, 1)
    kept, losses = {}, []
    for step in range(320):
        sample = step % 140
        if sample not in kept:
            kept[sample] = torch.randn(5000, 48, generator=torch.Generator().manual_seed(sample * 2 + rank))
        x = kept[sample][torch.randint(0, 5000, (48,))]
        loss = nn.functional.mse_loss(model(x), (x @ weight).tanh())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
