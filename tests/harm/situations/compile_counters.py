"""What dynamo counts while model, loss, step and loop are compiled."""

import torch
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.config
from _report import batches, report, start
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(16, 8), nn.Linear(8, 4)

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)

    def forward(self, x):
        return self.head(self.layer(x).relu())


def counted():
    return {name: dict(sorted(counts.items())) for name, counts in sorted(torch._dynamo.utils.counters.items())}


start()
# these caches lie on the machine's disk: what the first run has put there the second one would hit
torch._functorch.config.enable_autograd_cache = torch._inductor.config.fx_graph_cache = False
plain, model, other = Net(), nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), Net()
optimizer = torch.optim.SGD([*plain.parameters(), *model.parameters(), *other.parameters()], 0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
losses = []


def train(forward, loss_of=lambda out: out.square().mean()):
    for x in batches(count=4):
        optimizer.zero_grad()
        loss = loss_of(forward(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())


train(plain)
train(torch.compile(plain, backend="aot_eager"))
train(
    torch.compile(model, backend="aot_eager"), torch.compile(lambda out: nn.functional.mse_loss(out, out.detach() + 1))
)
other.compile(backend="aot_eager")
train(other)


@torch.compile(backend="aot_eager")
def whole(x):
    out = nn.Module.__call__(plain, x)
    torch._dynamo.graph_break()
    return model(out @ torch.ones(4, 16)).square().mean()


@torch.compile(backend="aot_eager")
def step(x):
    optimizer.zero_grad()
    loss = whole(x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    schedule.step()
    return loss.detach()


for x in batches(count=3):
    losses.append(step(x))
    optimizer.step()
with torch.no_grad():
    model.eval(), whole(torch.ones(2, 16))
report([plain, model, other], [], losses)
for name, counts in counted().items():
    print(name, {key: value for key, value in counts.items() if "time" not in str(key)})
