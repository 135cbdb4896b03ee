"""Pruning in every way, with removal, while the model trains

slow: yes
"""

import torch
import torch.nn.utils.prune as prune
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
prune.l1_unstructured(model[0], "weight", 0.3)
losses += train(model, optimizer, batches(20))
prune.random_structured(model[2], "weight", 0.5, dim=0)
optimizer = torch.optim.AdamW(model.parameters())
losses += train(model, optimizer, batches(20))
prune.global_unstructured([(model[0], "weight"), (model[2], "weight")], prune.L1Unstructured, amount=0.2)
losses += train(model, optimizer, batches(20))
prune.remove(model[0], "weight")
losses += train(model, optimizer, batches(20))
report([model], [optimizer], losses, b=sorted(dict(model.named_buffers())))
