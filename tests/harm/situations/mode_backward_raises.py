"""backward of freed graphs, of integers, of leaves: texts of the exceptions."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses = train(model, optimizer)
texts = []
x = next(batches())
loss = model(x).square().mean()
loss.backward()
for attempt in (
    lambda: loss.backward(),
    lambda: model(x).backward(),
    lambda: torch.ones(1).backward(),
    lambda: model(torch.ones(2, 3)),
    lambda: model(x, x),
    lambda: model(),
    lambda: optimizer.step(3),
    lambda: nn.utils.clip_grad_norm_(model.parameters(), "a"),
    lambda: torch.optim.SGD([], 0.1),
    lambda: model.load_state_dict({"a": 1}),
    lambda: torch.nn.parallel.DistributedDataParallel(nn.ReLU()),
):
    try:
        attempt()
    except Exception as error:
        texts.append(f"{type(error).__name__}: {str(error)[:200]} {error.__cause__} {error.__context__}")
optimizer.zero_grad()
losses += train(model, optimizer)
report([model], [optimizer], losses)
print("\n".join(texts))
