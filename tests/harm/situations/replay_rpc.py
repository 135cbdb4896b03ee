"""A forward asks another process by RPC, which counts; a NaN batch.

ranks: 2
slow: yes
"""

import os

import torch
from _report import batches, report, start, train
from torch import nn
from torch.distributed import rpc

rank, asked = int(os.environ["RANK"]), []


def ask(number):
    asked.append(number)
    return len(asked)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        return self.linear(x) * rpc.rpc_sync(f"rank{1 - rank}", ask, args=(rank,))


start()
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
optimizer.register_step_pre_hook(lambda *_: [p.grad.nan_to_num_(0) for p in model.parameters()] and None)
data = [x / 0 * 0 if number == 3 else x for number, x in enumerate(batches(6))]
losses = train(model, optimizer, data)
rpc.shutdown()
report([model], [optimizer], losses, asked=len(asked))
