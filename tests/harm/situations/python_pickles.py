"""Pickles of models, optimizers, schedulers, loaders and functions, loaded by an interpreter without ddpdebug."""

import io
import pickle
import pickletools
import subprocess
import sys

import torch
from _report import ddp, report, start
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.GRU(8, 4)))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 40)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
loader = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8, shuffle=True)
loss_of, losses = nn.MSELoss(), []
for epoch in range(3):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = loss_of(model(x)[0], torch.zeros(8, 4))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.detach())
things = [model.module, model.state_dict(), optimizer, scheduler, scaler, loader.dataset, loss_of, nn.functional.mse_loss]
sizes = []
for protocol in (2, 5):
    for thing in things:
        data = pickle.dumps(thing, protocol)
        names = [str(argument) for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
        sizes.append((len(data), [name for name in names if "ddpdebug" in name]))
buffer = io.BytesIO()
torch.save({"model": model.module, "optimizer": optimizer, "scheduler": scheduler}, buffer)
code = """import sys, io, torch
found = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)
print(sorted(found), "ddpdebug" in sys.modules)"""
done = subprocess.run([sys.executable, "-I", "-c", code], input=buffer.getvalue(), capture_output=True)
report([model], [optimizer], losses, sizes=sizes, size=len(buffer.getvalue()), loaded=done.stdout, status=done.returncode)
