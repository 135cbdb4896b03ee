"""torch.compile of whole training steps: loop, loader, clipping, scaler, schedule, backward.

slow: yes
"""

import torch
from _report import batches, ddp, report, start
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

start()
compiled = []


def backend(graph, inputs):
    compiled.append(sorted(str(node.target) for node in graph.graph.nodes if node.op.startswith("call")))
    return graph.forward


def parts(wrapped):
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    model = ddp(inner) if wrapped else inner
    optimizer = torch.optim.SGD(inner.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return inner, model, optimizer, scheduler


def whole(model, optimizer, scheduler, scaler, x):
    optimizer.zero_grad()
    loss = functional.mse_loss(model(x), x[:, :4])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    return loss.detach()


def epoch(model, optimizer, loader):
    losses = []
    for x in loader:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def forward(model, x):
    return functional.mse_loss(model(x), x[:, :4])


for wrapped in (True, False):
    for name in ("whole", "epoch", "forward", "eval"):
        torch._dynamo.reset()
        counters.clear()
        compiled.clear()
        inner, model, optimizer, scheduler = parts(wrapped)
        losses = []
        if name == "whole":
            step = torch.compile(whole, backend=backend)
            losses = [step(model, optimizer, scheduler, torch.amp.GradScaler("cpu"), x) for x in batches()]
        elif name == "epoch":
            loader = torch.utils.data.DataLoader(torch.cat([*batches()]), batch_size=8)
            losses = torch.compile(epoch, backend=backend)(model, optimizer, loader)
        else:
            step = torch.compile(forward, backend=backend)
            for x in batches():
                if name == "eval":
                    with torch.no_grad():
                        losses.append(step(model, x))
                loss = step(model, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        breaks = sum(counters["graph_break"].values())
        print(name, wrapped, counters["stats"]["unique_graphs"], "graphs", breaks, "breaks")
        print(compiled)
        report([inner], [optimizer], losses)
