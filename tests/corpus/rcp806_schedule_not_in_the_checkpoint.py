# title: A job goes on from a checkpoint of model and optimizer; its cosine schedule begins at step 0 again
# source: https://github.com/lightly-ai/lightly-train/pull/301
# nproc: 2
# expect.codes: RCP806
# expect.ranks: all
# expect.subject: CosineAnnealingLR
# expect.step: 0
# plain_pytorch: silent
"""The checkpoint was written by an earlier job, after 40 steps; here that job is played before DDP is made."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

FAULT = os.environ.get("FAULT", "1") == "1"


def parts():
    torch.manual_seed(37)
    net = nn.Sequential(nn.Linear(9, 30), nn.Mish(), nn.Linear(30, 3))
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    return net, opt, lr_scheduler.CosineAnnealingLR(opt, T_max=400)


def checkpoint():
    """What is on the disk: the states after 40 steps, made without training."""
    net, opt, schedule = parts()
    moments = {"exp_avg": 1e-3, "exp_avg_sq": 1e-4}
    own = {i: {k: torch.full(p.shape, v) for k, v in moments.items()} for i, p in enumerate(net.parameters())}
    state = opt.state_dict() | {"state": {i: s | {"step": torch.tensor(40.0)} for i, s in own.items()}}
    about = schedule.state_dict() | {"last_epoch": 40, "_step_count": 41}
    return {"net": net.state_dict(), "opt": state, "schedule": about}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    saved = checkpoint()
    net, opt, schedule = parts()
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    if not FAULT:
        schedule.load_state_dict(saved["schedule"])
    ddp = DistributedDataParallel(net)
    truth = torch.randn(9, 3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        x = torch.randn(24, 9, generator=gen)
        loss = nn.functional.cross_entropy(ddp(x), (x @ truth).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
