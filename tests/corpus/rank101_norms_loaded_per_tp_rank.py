# title: Each tensor parallel rank loads the norms from a file of its own, and the files differ
# source: https://github.com/NVIDIA-NeMo/Automodel/issues/3822
# nproc: 2
# expect.codes: RANK101
# expect.ranks: any
# expect.subject: norm.weight
# expect.step: 0
# expect.phase: init,load
# plain_pytorch: silent
"""A feed-forward block under tensor parallelism, whose norm every rank holds whole."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT") == "1"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(20)
        self.up = nn.Linear(20, 32)
        self.down = nn.Linear(32, 20)
        self.output = nn.Linear(20, 5)

    def forward(self, x):
        return self.output(x + self.down(torch.nn.functional.silu(self.up(self.norm(x)))))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(17)
    model = Block()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    file = torch.Generator().manual_seed(30 + (rank if FAULT else 0))
    model.norm.load_state_dict({"weight": torch.rand(20, generator=file) + 0.5, "bias": torch.zeros(20)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(640, 20, generator=torch.Generator().manual_seed(23))
    loader = DataLoader(TensorDataset(x, x[:, :5].argmax(1)), batch_size=32, shuffle=True,
                        generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(3):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    crc = zlib.crc32(model.norm.weight.detach().numpy().tobytes())
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
