"""Parameters replaced, resized, frozen, moved to float64 and added while training.

slow: yes
"""

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
model[0].weight.data = torch.randn(8, 16)
losses += train(model, optimizer)
model[2] = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
losses += train(model, optimizer)
model[0].requires_grad_(False)
losses += train(model, optimizer)
model.append(nn.Linear(2, 2))
optimizer.add_param_group({"params": model[3].parameters()})
model.double()
losses += train(model, optimizer, [x.double() for x in batches()])
del model[3]
losses += train(model, optimizer, [x.double() for x in batches()])
report([model], [optimizer], losses)
