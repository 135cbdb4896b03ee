"""A compiled DDP; what dynamo has counted, and the files of the frames that it was given; two ranks.

ranks: 2
parts: all
"""

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

start()
given = []
convert = convert_frame.ConvertFrame.__call__


def noted(self, frame, *args, **kwargs):
    given.append((frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name))
    return convert(self, frame, *args, **kwargs)


convert_frame.ConvertFrame.__call__ = noted
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
wrapped = torch.compile(ddp(model), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(wrapped, optimizer, batches())
convert_frame.ConvertFrame.__call__ = convert
report([model], [optimizer], losses, given=sorted(set(given)), frames=dict(counters["frames"]))
del wrapped
finish()
