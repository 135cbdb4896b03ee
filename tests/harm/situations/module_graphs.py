"""Models that are graphs: symbolically traced, exported and unflattened, and packed sequences through an LSTM."""

import torch
from _report import ddp, digest, report, start
from torch import fx, nn
from torch.nn.utils import rnn

start()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 8, batch_first=True)

    def forward(self, packed):
        return self.lstm(packed)[0]


traced = fx.symbolic_trace(Net())
exported = torch.export.export(Net(), (torch.randn(8, 16),))
models = [ddp(traced), exported.module(), torch.export.unflatten(exported), Words()]
optimizers, losses = [], []
for model in models:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    optimizers.append(optimizer)
    for step in range(8):
        optimizer.zero_grad()
        if type(model) is Words:
            data = [torch.randn(length, 16) for length in (5, 3, 2)]
            out = model(rnn.pack_sequence(data)).data
        else:
            out = model(torch.randn(8, 16))
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
print(traced.code, digest(sorted(traced.state_dict())), traced.graph)
report(models, optimizers, losses)
