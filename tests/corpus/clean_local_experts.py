# title: Each rank trains experts of its own, which are on DDP's ignore list
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The experts' weights, gradients and optimizer state differ between ranks, as declared before wrapping."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LocalExpert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared_in = nn.Linear(10, 24)
        self.expert = LocalExpert(24)
        self.shared_out = nn.Linear(24, 3)

    def forward(self, x):
        return self.shared_out(self.expert(torch.tanh(self.shared_in(x))))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = Model()
    local = [name for name, _ in net.named_parameters() if name.startswith("expert.")]
    DDP._set_params_and_buffers_to_ignore_for_model(net, local)
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for _ in range(60):
        x = torch.randn(40, 10, generator=gen)
        y = (x[:, 0] > 0).long() + (x[:, 1] * (1 - 2 * rank) > 0).long()
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    shared = [p for n, p in net.named_parameters() if n not in local]
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in shared))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
