"""What torch.distributed lists: groups, names, the next group's name.

ranks: 2
"""

import torch
import torch.distributed as dist
from _report import batches, ddp, finish, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
world = dist.distributed_c10d._world
seen = [sorted(world.pg_names.values()), world.group_count, len(world.pg_map)]
half = dist.new_group([0])
seen += [sorted(world.pg_names.values()), world.group_count]
for x in batches():
    works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(3)]
    losses += train(model, optimizer, [x])
    for work in works:
        work.wait()
    gathered = [None, None]
    dist.all_gather_object(gathered, float(x.sum()))
    losses += gathered
losses = [torch.as_tensor(loss) for loss in losses]
report([model], [optimizer], losses, seen=seen, keys=dist.group.WORLD is not None)
del model
finish()
