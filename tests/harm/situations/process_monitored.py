"""monitored_barrier that fails, barriers with timeouts, object collectives, patched get_world_size

ranks: 2
slow: yes
"""

import datetime
import os
import time

import torch
import torch.distributed as dist
from _report import batches, ddp, finish, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
r = int(os.environ["RANK"])
losses = train(model, optimizer, batches(20))
found = []
out = [None, None]
dist.all_gather_object(out, {"r": r})
b = [r, "x"]
dist.broadcast_object_list(b)
found += [out, b]
got = [None]
dist.scatter_object_list(got, [1, 2] if r == 0 else None)
found.append(got)
real = dist.get_world_size
dist.get_world_size = lambda *a: 77
dist.distributed_c10d.get_world_size, keep = dist.get_world_size, dist.distributed_c10d.get_world_size
losses += train(model, optimizer, batches(20))
dist.get_world_size = real
dist.distributed_c10d.get_world_size = keep
dist.monitored_barrier()
g = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
if r == 0:
    try:
        dist.monitored_barrier(g, timeout=datetime.timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError as e:
        found.append(str(e)[:60])
else:
    time.sleep(2.5)
losses += train(model, optimizer, batches(20))
report([model], [optimizer], losses, found=found)
del model
finish()
