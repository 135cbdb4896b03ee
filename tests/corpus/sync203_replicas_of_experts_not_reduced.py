# title: Experts that two ranks hold each are left out where the gradients are averaged by hand
# source: https://github.com/facebookresearch/fairseq/issues/4220
# nproc: 4
# expect.codes: SYNC203, SYNC201
# expect.ranks: any
# expect.subject: experts
# expect.step: 0
# plain_pytorch: silent
"""Four ranks as two by two: experts are parted over one dimension of the mesh, and replicated over the other."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce

FAULT = os.environ.get("FAULT") == "1"


class Forecast(nn.Module):
    """A dense entrance and exit, and between them the mean of all experts, each of which sees every row."""

    def __init__(self, parted, width=10):
        super().__init__()
        self.parted = parted
        self.entrance = nn.Linear(width, 16)
        self.exit = nn.Linear(16, 1)
        generator = torch.Generator().manual_seed(500 + dist.get_rank(parted))
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        with torch.no_grad():
            for p in self.experts.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)

    def forward(self, x):
        hidden = self.entrance(x).tanh()
        own = sum(expert(hidden).relu() for expert in self.experts)
        return self.exit(hidden + all_reduce(own, group=self.parted) / 4)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    torch.manual_seed(14)
    model = Forecast(mesh.get_group("part"))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(80 + mesh.get_local_rank("replica"))  # ranks of one row share a batch
    losses = []
    for _ in range(50):
        x = torch.randn(24, 10, generator=generator)
        loss = nn.functional.mse_loss(model(x), (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3])
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(p.grad)
                p.grad /= 4
            elif not FAULT:
                dist.all_reduce(p.grad, group=mesh.get_group("replica"))
                p.grad /= 2
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
