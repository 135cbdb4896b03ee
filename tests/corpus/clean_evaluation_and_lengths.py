# title: Lengths vary, and now and then an evaluation needs much more memory
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A recurrent tagger with batches of all lengths; the evaluation collects its outputs and drops them."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(33)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(12, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


net = Tagger()
ddp = DistributedDataParallel(net)
opt = torch.optim.Adam(ddp.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(330 + rank)
recent, track = [], []
for step in range(80):
    x = torch.randn(16, int(torch.randint(8, 120, (1,), generator=gen)), 12, generator=gen)
    loss = nn.functional.cross_entropy(ddp(x).flatten(0, 1), (x[..., 0] > 0).long().flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    recent.append(loss)
    if len(recent) == 8:
        track.append(float(torch.stack(recent).mean()))
        recent.clear()
    if step % 16 == 15:
        net.eval()
        with torch.no_grad():
            outputs = [net(torch.randn(64, 100, 12, generator=gen)) for _ in range(10 + step // 4)]
        score = float(torch.cat(outputs).mean())
        del outputs
        net.train()
first, final = track[0], track[-1]
crc = 0
for tensor in ddp.parameters():
    crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
print(f"RESULT rank={rank} first={first:.4f} final={final:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
