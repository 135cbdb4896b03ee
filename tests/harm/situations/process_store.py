"""Keys in the job's store: set, counted, awaited, deleted, listed; two ranks.

ranks: 2
"""

import datetime

import torch
import torch.distributed as dist
from _report import batches, ddp, finish, group, report, start, train
from torch import nn

start()
rank = group()
store = dist.distributed_c10d._get_default_store()
below = store
while hasattr(below, "underlying_store"):
    below = below.underlying_store
mine = dist.PrefixStore("mine", store)
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
seen, losses = [], []
for number in range(8):
    losses += train(model, optimizer, batches(5, seed=number))
    mine.set(f"{number}/{rank}", f"value {number}")
    mine.wait([f"{number}/{1 - rank}"], datetime.timedelta(seconds=60))
    seen.append(mine.get(f"{number}/{1 - rank}"))
    mine.add(f"count {number}", rank + 1)
    dist.barrier()
    seen.append((mine.add(f"count {number}", 0), mine.check([f"{number}/0", "missing"])))
    if rank == 0:
        seen.append((mine.compare_set("turn", str(number - 1) if number else "", str(number)), mine.get("turn")))
        if number % 2:
            seen.append(mine.delete_key(f"{number}/1"))
        own = sorted(key.partition("mine/")[2] for key in below.list_keys() if "mine/" in key)
        others = {key for key in below.list_keys() if "mine/" not in key and "ddpdebug/" not in key}
        seen.append((own, len(others)))
    dist.barrier()
report([model], [optimizer], losses, seen=seen, timeout=store.timeout)
del model
finish()
