"""Bars of tqdm around epochs and steps, on stderr; a message above them, a NaN batch

run: alone
"""

import torch
from _report import batches, report, start
from torch import nn
from tqdm import tqdm

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
shape = {"bar_format": "{desc} {n_fmt}/{total_fmt}", "mininterval": 0, "miniters": 1}
for epoch in tqdm(range(4), desc="epochs", **shape):
    data = list(batches())
    if epoch == 2:
        data[1][0, 0] = float("nan")
    bar = tqdm(data, desc="steps", leave=False, **shape)
    for x in bar:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        bar.set_postfix(loss=1)
    tqdm.write(f"epoch {epoch}")
report([model], [optimizer], losses, bars=len(tqdm._instances), interval=tqdm.monitor_interval)
