"""AveragedModel, EMA, SWALR, update_bn and their counts

slow: yes
"""

import torch
from _report import batches, report, start, train
from torch import nn
from torch.optim import swa_utils as S

start()
model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
a = S.AveragedModel(model)
e = S.AveragedModel(model, multi_avg_fn=S.get_ema_multi_avg_fn(0.9), use_buffers=True)
sch = S.SWALR(optimizer, 0.01, 5)
losses = []
for i, x in enumerate(batches(40)):
    losses += train(model, optimizer, [x])
    e.update_parameters(model)
    if i > 20:
        a.update_parameters(model)
        sch.step()
S.update_bn(list(batches(8)), a)
a.eval()
losses.append(a(next(iter(batches(1)))).sum())
report([model, a, e], [optimizer], losses, n=(a.n_averaged, e.n_averaged), lr=sch.get_last_lr())
