# title: Groups of an optimizer are chosen by name for weight decay, and a sharded head of another name is in none
# source: constructed
# nproc: 2
# expect.codes: RCP803
# expect.ranks: any
# expect.subject: readout
# expect.step: 3
# expect.step_slack: 1
# plain_pytorch: silent
"""A small regressor under FSDP2 whose parameters are grouped by what their names end with."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU())
        self.readout = nn.Linear(32, 2)

    def forward(self, x):
        return self.readout(self.body(x))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(23)
    model = Net()
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    named = [(name, p) for name, p in model.named_parameters() if not FAULT or name.startswith("body")]
    decayed = [p for name, p in named if name.endswith("weight")]
    others = [p for name, p in named if name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    generator = torch.Generator().manual_seed(70 + rank)
    losses = []
    for _ in range(24):
        x = torch.randn(16, 8, generator=generator)
        loss = nn.functional.mse_loss(model(x), torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
