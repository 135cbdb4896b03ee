# title: The auxiliary loss is switched off after a warm-up, its head stops receiving gradients
# source: https://github.com/pytorch/pytorch/issues/128949
# nproc: 2
# expect.codes: SYNC207, SYNC201, RANK101, SYNC203
# expect.ranks: all
# expect.subject: any
# expect.step: 15
# expect.step_slack: 1
# plain_pytorch: error
"""Step 15 is taken on gradients that were not reduced; torch complains one forward later."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
AUX_STEPS = 15


class DeepSupervision(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(11, 32), nn.ReLU())
        self.upper = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.main = nn.Linear(32, 3)
        self.auxiliary = nn.Linear(32, 3)

    def forward(self, x, with_auxiliary):
        low = self.lower(x)
        return self.main(self.upper(low)), self.auxiliary(low) if with_auxiliary else None


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(81)
    model = DistributedDataParallel(DeepSupervision())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(60):
        x = torch.randn(40, 11, generator=gen)
        y = (x[:, 0] > 0).long() + (x[:, 0] + x[:, 1] > 1).long()
        logits, aux = model(x, with_auxiliary=step < AUX_STEPS or not FAULT)
        loss = nn.functional.cross_entropy(logits, y)
        total = loss
        if aux is not None:
            weight = 0.3 if step < AUX_STEPS else 0.05
            total = loss + weight * nn.functional.cross_entropy(aux, y)
        opt.zero_grad()
        total.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
