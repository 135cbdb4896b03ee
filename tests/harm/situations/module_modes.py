"""Parts of a model change train and eval mode in every way."""

import torch
from _report import batches, report, start, train
from torch import nn

asked = []


class Part(nn.Sequential):
    """Notes who asks for its mode, and who sets it."""

    def train(self, mode=True):
        asked.append(("train", mode))
        return super().train(mode)

    def __getattribute__(self, name):
        if name == "training":
            asked.append("training")
        return super().__getattribute__(name)


start()
model = Part(nn.Linear(16, 8), nn.BatchNorm1d(8), Part(nn.Dropout(0.3), nn.Linear(8, 8)), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, batches(20))
model[1].eval()
losses += train(model, optimizer, batches(20))
model[2].eval()
losses += train(model, optimizer, batches(20))
for k, x in enumerate(batches(20)):
    model.train(k % 3 > 0)
    with torch.set_grad_enabled(k % 2 == 0):
        model(x)
    model.train()
    model[2][0].training = k % 5 > 0
    losses += train(model, optimizer, [x])
model.training = False  # of the outermost module alone
losses += train(model, optimizer, batches(20))
report([model], [optimizer], losses, modes=[m.training for m in model.modules()], asked=asked)
