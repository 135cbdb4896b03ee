"""Models converted by swapping parameters between two DDPs and after them; two ranks.

ranks: 2
"""

import gc

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn

start()
torch.__future__.set_swap_module_params_on_conversion(True)
model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
# without broadcasts of buffers: a thread of gloo can hold a buffer a little longer, which then cannot be swapped
wrapped = ddp(model, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
losses = train(wrapped, optimizer)
del wrapped, optimizer
gc.collect()
model.zero_grad()
model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
model.double()
wrapped = ddp(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
losses += train(wrapped, optimizer, (x.double() for x in batches()))
del wrapped, optimizer
gc.collect()
model.zero_grad()
model.float()
report([model], [], losses)
finish()
