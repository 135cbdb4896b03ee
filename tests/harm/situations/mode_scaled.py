"""GradScaler that skips steps, no_sync, checkpointing, OneCycle and a loader; two ranks.

ranks: 2
"""

import torch
from _report import ddp, finish, report, start
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(checkpoint(self.inner, x, use_reentrant=False))


start()
data = torch.randn(64, 16, generator=torch.Generator().manual_seed(5))
data[40, 0] = 70000.0
model = ddp(Net())
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 40)
losses, scales = [], []
for epoch in range(3):
    for number, x in enumerate(torch.utils.data.DataLoader(data, 8, shuffle=True)):
        model.require_backward_grad_sync = number % 2 == 1
        with torch.autocast("cpu", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        losses.append(loss.detach())
        if number % 2 == 0:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
report([model], [optimizer], losses, scales=scales, rates=scheduler.get_last_lr())
del model
finish()
