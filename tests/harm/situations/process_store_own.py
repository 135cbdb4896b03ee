"""The group's store is a class of the script's, in Python, without `clone`; it counts its calls; two ranks

ranks: 2
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _report import ddp, report, start, train
from torch import nn


class Folder(dist.Store):
    """Keys are files of a folder."""

    def __init__(self, root):
        super().__init__()
        self.root = Path(root)
        self.calls = set()

    def _of(self, key):
        return self.root / key.replace("/", "~")

    def set(self, key, value):
        self.calls.add("set")
        path = self._of(key)
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_bytes(value.encode() if isinstance(value, str) else bytes(value))
        own.rename(path)

    def get(self, key):
        self.calls.add("get")
        self.wait([key])
        return self._of(key).read_bytes()

    def add(self, key, number):
        self.calls.add("add")
        import fcntl

        with open(self.root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._of(key)
            value = int(path.read_text() if path.exists() else 0) + number
            self.set(key, str(value))
        return value

    def wait(self, keys, timeout=None):
        self.calls.add("wait")
        while not all(self._of(key).exists() for key in keys):
            time.sleep(0.01)

    def check(self, keys):
        return all(self._of(key).exists() for key in keys)

    def delete_key(self, key):
        self._of(key).unlink(missing_ok=True)
        return True

    def set_timeout(self, timeout):
        pass

    @property
    def timeout(self):
        import datetime

        return datetime.timedelta(seconds=60)


start()
folder = Path("store")
folder.mkdir(exist_ok=True)
store = Folder(folder)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
report([model], [optimizer], losses, calls=sorted(store.calls))
del model
dist.barrier()
dist.destroy_process_group()
