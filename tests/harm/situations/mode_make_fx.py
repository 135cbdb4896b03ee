"""make_fx of training steps, real, fake and symbolic; fake tensors with a table of shapes outside of their mode.

parts: all
"""

import torch
from _report import batches, digest, report, start, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

start()
model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)


def step(x, targets):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), targets)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def evaluation(x, targets):
    with torch.no_grad():
        return F.cross_entropy(model(x), targets) + nn.MSELoss()(model(x), torch.zeros(8, 3))


def nodes_of(function, mode, x, **options):
    traced = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True, **options)(x, targets)
    return len(traced.graph.nodes), digest([str(node.target) for node in traced.graph.nodes])


targets = torch.arange(8) % 3
losses = train(model, optimizer, batches())
nodes = [nodes_of(one, mode, x) for one in (step, evaluation) for mode in ("real", "fake", "symbolic") for x in batches(1)]
nodes += [nodes_of(evaluation, mode, x, pre_dispatch=True) for mode in ("real", "fake") for x in batches(1)]

shapes = ShapeEnv()
with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True):
    sketch = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    rehearsal = torch.optim.Adam(sketch.parameters())
    x, labels = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)
for _ in range(3):
    F.cross_entropy(sketch(x), labels).backward()
    nn.utils.clip_grad_norm_(sketch.parameters(), 1.0)
    rehearsal.step()
    rehearsal.zero_grad()
losses += train(model, optimizer, batches())
report([model], [optimizer], losses, nodes=nodes, pending=sorted(map(str, shapes.pending_fresh_unbacked_symbols)))
