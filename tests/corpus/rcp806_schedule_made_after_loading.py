# title: After an interruption the trainer loads its state first and makes the scheduler then
# source: constructed
# nproc: 2
# expect.codes: RCP806
# expect.ranks: all
# expect.subject: LinearLR
# expect.step: 24
# plain_pytorch: silent
"""What was loaded into the old scheduler is gone with it: the warm-up starts anew at step 24."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

FAULT = os.environ.get("FAULT", "1") == "1"


class Trainer:
    def __init__(self):
        torch.manual_seed(41)
        self.ddp = DistributedDataParallel(nn.Sequential(nn.Linear(11, 28), nn.CELU(), nn.Linear(28, 2)))
        self.opt = torch.optim.Adam(self.ddp.parameters(), lr=5e-3)
        self.schedule = self.make_schedule()

    def make_schedule(self):
        return lr_scheduler.LinearLR(self.opt, start_factor=0.1, total_iters=60)

    def state(self):
        return {"net": self.ddp.state_dict(), "opt": self.opt.state_dict(), "schedule": self.schedule.state_dict()}

    def load(self, saved):
        self.ddp.load_state_dict(saved["net"])
        self.opt.load_state_dict(saved["opt"])
        self.schedule.load_state_dict(saved["schedule"])
        if FAULT:
            self.schedule = self.make_schedule()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer, losses = Trainer(), []
    truth = torch.randn(11, 2)
    gen = torch.Generator().manual_seed(77 + rank)
    for step in range(70):
        if step == 24:
            saved = trainer.state()
            trainer = Trainer()
            trainer.load(saved)
        x = torch.randn(24, 11, generator=gen)
        loss = nn.functional.mse_loss(trainer.ddp(x), (x @ truth).sin())
        trainer.opt.zero_grad()
        loss.backward()
        trainer.opt.step()
        trainer.schedule.step()
        losses.append(loss.item())
    ddp = trainer.ddp
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
