"""torch is imported late, by another package and thread.

run: alone
"""

import importlib.util
import sys
import threading


class Finder:
    def find_spec(self, name, path=None, target=None):
        seen.append(name) if name == "torch" else None


seen = []
sys.meta_path.insert(0, Finder())
sys.meta_path.append(Finder())
print(importlib.util.find_spec("torch").loader.__class__, importlib.util.find_spec("nothere"))


def load():
    global report, start, train, nn, torch
    import torch
    from _report import report, start, train
    from torch import nn


try:
    sys.modules["numpy"] = None  # as if it were not there
    importlib.import_module("_report")
except ImportError as error:
    print(error)
del sys.modules["numpy"]
thread = threading.Thread(target=load)
thread.start()
thread.join()
print(seen, [type(finder).__name__ for finder in sys.meta_path])
start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
report([model], [optimizer], losses)
